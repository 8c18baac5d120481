"""Plots: where their lines, points and marks are. templates/parts.html draws them as SVG."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

WIDTH, HEIGHT = 480, 280
LEFT, RIGHT, TOP, BOTTOM = 46, 14, 30, 38
STYLES, DENSE = 9, 24  # colours in report.css; the most points of a line that are drawn
SHAPES = (
    "m-3 0a3 3 0 1 0 6 0a3 3 0 1 0 -6 0",
    "m-3 -3h6v6h-6z",
    "m0 -4l4 4l-4 4l-4 -4z",
    "m0 -4l4 7h-8z",
    "m0 4l4 -7h-8z",
)
"""Shapes of points: no two of 45 lines have both the colour and the shape in common."""

Number = float | int


@dataclass(frozen=True)
class Series:
    """A line: its style is a colour and a shape of its points."""

    name: str
    points: Sequence[tuple[Number, Number]]
    style: int = 0
    dashed: bool = False

    @property
    def style_class(self) -> str:
        """The class of its colour in report.css."""
        return f"s{self.style % STYLES}"

    @property
    def shape(self) -> str:
        """The path of one of its points."""
        return SHAPES[self.style % len(SHAPES)]

    @property
    def look(self) -> str:
        """Its classes in report.css; many points are shown only when asked for."""
        classes = {"dashed": self.dashed, "dense": self.is_dense}
        return " ".join(("line", self.style_class, *(c for c in classes if classes[c])))

    @property
    def is_dense(self) -> bool:
        """Whether it has too many points to draw each."""
        return len(self.points) > DENSE


@dataclass(frozen=True)
class Axis:
    """An axis of a plot; without `ticks` it has round numbers."""

    label: str
    log: bool = False
    limits: tuple[Number, Number] | None = None
    ticks: Sequence[Number] | None = None

    def scale(self, values: Sequence[Number], low: Number, high: Number) -> "Scale":
        """The scale from values to pixels between low and high."""
        if self.limits is not None:
            first, last = self.limits
        else:
            first, last = (min(values), max(values)) if values else (0.0, 1.0)
        if self.log:
            first, last = math.log(first), math.log(last)
        if last - first < 1e-12 * max(1, abs(first)):
            first, last = first - 0.5 * max(1, abs(first)), last + 0.5 * max(1, abs(last))
        return Scale(first, last, low, high, log=self.log)

    def marks(self, scale: "Scale") -> list[Number]:
        """The values that are marked on the axis."""
        if self.ticks is not None:
            return list(self.ticks)
        if self.log:
            tens = range(math.ceil(scale.first / math.log(10)), 99)
            found = [10.0**k for k in tens if math.log(10) * k <= scale.last + 1e-9]
            return found if len(found) > 1 else [math.exp(scale.first), math.exp(scale.last)]
        return _round_marks(scale.first, scale.last)


@dataclass(frozen=True)
class Scale:
    """A scale from values to pixels."""

    first: Number
    last: Number
    low: Number
    high: Number
    log: bool = False

    def __call__(self, value: Number) -> Number:
        """The pixel of a value."""
        place = math.log(value) if self.log else value
        share = (place - self.first) / (self.last - self.first)
        return round(self.low + share * (self.high - self.low), 1)


class Guide(NamedTuple):
    """A horizontal line, and where its name begins."""

    name: str
    place: Number
    left: float
    base: float


class Point(NamedTuple):
    """A point of a line and its value as text."""

    x: Number
    y: Number
    shape: str
    text: str


class Line(NamedTuple):
    """A line of a plot: its points or, where there are many, their values as text."""

    series: Series
    path: str
    points: list[Point]
    values: str


class Bar(NamedTuple):
    """A bar of a plot and its value as text."""

    series: Series
    left: float
    top: Number
    width: float
    height: float
    middle: float
    text: str


class Group(NamedTuple):
    """Bars side by side."""

    name: str
    middle: float
    bars: list[Bar]


@dataclass
class Plot:
    """Everything that is drawn of a plot. `key` must be unique on its page."""

    key: str
    title: str
    description: str
    y_label: str
    y_marks: list[tuple[Number, str]]
    legend: Sequence[Series]
    note: str = ""
    x_label: str = ""
    x_marks: list[tuple[Number, str]] = field(default_factory=list)
    guides: list[Guide] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    right: int = WIDTH - RIGHT
    bottom: int = HEIGHT - BOTTOM


def line_plot(
    key: str,
    title: str,
    description: str,
    series: Sequence[Series],
    *,
    x: Axis,
    y: Axis,
    guides: Sequence[tuple[Number, str]] = (),
    note: str = "",
) -> Plot:
    """Lines with a point for each value; `guides` are horizontal lines with a name.

    `note` stands under the plot. A value beyond the limits of y is drawn at the edge and told as
    it is.
    """
    xs = [a for one in series for a, _ in one.points] or [0.0, 1.0]
    ys = [b for one in series for _, b in one.points] + [value for value, _ in guides]
    across = x.scale(xs, LEFT, WIDTH - RIGHT)
    up = y.scale(ys, HEIGHT - BOTTOM, TOP)
    places = [
        [(across(a), min(max(up(b), TOP), HEIGHT - BOTTOM)) for a, b in one.points]
        for one in series
    ]
    return Plot(
        key,
        title,
        description,
        y_label=y.label,
        y_marks=[(up(mark), _tick(mark)) for mark in y.marks(up)],
        legend=series,
        note=note,
        x_label=x.label,
        x_marks=[(across(mark), _tick(mark)) for mark in x.marks(across)],
        guides=[Guide(n, up(v), *_free_place(n, up(v), places)) for v, n in guides],
        lines=[
            _line(one, line, (x.label, y.label)) for one, line in zip(series, places, strict=True)
        ],
    )


def _line(one: Series, places: Sequence[tuple[Number, Number]], names: tuple[str, str]) -> Line:
    path = " ".join(f"{'L' if k else 'M'}{a:g} {b:g}" for k, (a, b) in enumerate(places))
    if one.is_dense:
        return Line(one, path, [], ";".join(f"{shown(a)} {shown(b)}" for a, b in one.points))
    points = [
        Point(
            x,
            y,
            f"M{x:g} {y:g}{one.shape}",
            f"{names[0]} {shown(a)}, {names[1]} {shown(b)}",
        )
        for (x, y), (a, b) in zip(places, one.points, strict=True)
    ]
    return Line(one, path, points, "")


def _free_place(
    name: str, guide: Number, lines: Sequence[Sequence[tuple[Number, Number]]]
) -> tuple[float, float]:
    """The left end and the base line of a guide's name, where the fewest lines pass.

    The name is above or below the guide; places on the right are tried first.
    """
    wide = 8.0 * len(name)
    bases = [base for base in (guide - 5, guide + 14) if TOP + 9 <= base <= HEIGHT - BOTTOM]
    room = WIDTH - RIGHT - wide - LEFT
    corners = [(LEFT + room * k / 4, base) for k in (4, 3, 2, 1, 0) for base in bases]
    shares = [k / 16 for k in range(17)]
    near = [
        (a + t * (c - a), place)
        for line in lines
        for (a, b), (c, d) in itertools.pairwise(line)
        for t in shares
        if guide - 20 <= (place := b + t * (d - b)) <= guide + 19
    ]

    def passing(corner: tuple[float, float]) -> int:
        left, base = corner
        return sum(left - 4 <= a <= left + wide + 4 and base - 15 <= b <= base + 5 for a, b in near)

    left, base = min(corners, key=passing)
    return round(left, 1), round(base, 1)


def bar_plot(
    key: str,
    title: str,
    description: str,
    *,
    groups: Sequence[str],
    series: Sequence[tuple[str, Sequence[Number | None]]],
    y: Axis,
) -> Plot:
    """Bars side by side for each group; there is no bar for None."""
    values = [value for _, many in series for value in many if value is not None]
    up = Axis(y.label, limits=(0, max([*values, 1e-9]))).scale(values, HEIGHT - BOTTOM, TOP)
    room = (WIDTH - LEFT - RIGHT) / max(1, len(groups))
    wide = min(36.0, 0.8 * room / max(1, len(series)))
    legend = [Series(name, (), k) for k, (name, _) in enumerate(series)]
    drawn = []
    for place, group in enumerate(groups):
        middle = LEFT + (place + 0.5) * room
        bars = []
        for k, (_, many) in enumerate(series):
            if (value := many[place]) is None:
                continue
            left, top = middle + (k - len(series) / 2) * wide, up(value)
            bar = Bar(
                legend[k],
                left=round(left + 1, 1),
                top=top,
                width=round(wide - 2, 1),
                height=round(HEIGHT - BOTTOM - top, 1),
                middle=round(left + wide / 2, 1),
                text=f"{group}, {y.label} {shown(value)}",
            )
            bars.append(bar)
        drawn.append(Group(group, round(middle, 1), bars))
    marks = [(up(mark), _tick(mark)) for mark in y.marks(up)]
    return Plot(key, title, description, y.label, marks, legend, groups=drawn)


def shown(value: Number) -> str:
    """A number with four digits; whole numbers with all their digits."""
    text = f"{value:.0f}" if float(value).is_integer() and abs(value) < 1e15 else f"{value:.4g}"
    return text.replace("-", "−")


def _round_marks(first: Number, last: Number, about: int = 5) -> list[Number]:
    """Multiples of 1, 2 or 5 times a power of ten."""
    size = (last - first) / about
    power = 10.0 ** math.floor(math.log10(size))
    step = next(power * k for k in (1, 2, 5, 10) if power * k >= size * 0.999)
    start = math.ceil(first / step - 1e-9)
    return [k * step for k in range(start, math.floor(last / step + 1e-9) + 1)]


def _tick(value: Number) -> str:
    """A short number: "40k", "2^14" for powers of two from 256 on, "0.2"."""
    whole = int(value)
    if value == whole and whole >= 256 and whole & (whole - 1) == 0:
        power = str(whole.bit_length() - 1).translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))
        return f"2{power}"
    if abs(value) >= 1000 and value == whole and whole % 100 == 0:
        return f"{value / 1000:g}k"
    return f"{value:.3g}".replace("-", "−")
