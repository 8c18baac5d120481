"""Plots: where their lines, points and bars are. templates/parts.html draws them as SVG."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

WIDTH, HEIGHT = 480, 280
LEFT, RIGHT, TOP, BOTTOM = 46, 466, 30, 242
"""The edges of what is drawn between the axes."""
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
    """A line, or the bars of one colour: its style is a colour and a shape of its points."""

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
        classes = ["line", self.style_class]
        classes += ["dashed"] if self.dashed else []
        classes += ["dense"] if self.is_dense else []
        return " ".join(classes)

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


class Scale:
    """The pixels of values on an axis: from `low` to `high`."""

    def __init__(self, axis: Axis, values: Sequence[Number], low: Number, high: Number):
        first, last = axis.limits or (min(values, default=0.0), max(values, default=1.0))
        if axis.log:
            first, last = math.log(first), math.log(last)
        if last - first < 1e-12 * max(1, abs(first)):
            first, last = first - 0.5 * max(1, abs(first)), last + 0.5 * max(1, abs(last))
        self.axis, self.first, self.last, self.low, self.high = axis, first, last, low, high

    def __call__(self, value: Number) -> Number:
        """The pixel of a value."""
        place = math.log(value) if self.axis.log else value
        share = (place - self.first) / (self.last - self.first)
        return round(self.low + share * (self.high - self.low), 1)

    @property
    def marks(self) -> list[tuple[Number, str]]:
        """The pixels and the texts of the values that are marked on the axis."""
        return [(self(value), _tick(value)) for value in self._marked()]

    def _marked(self) -> Sequence[Number]:
        if self.axis.ticks is not None:
            return self.axis.ticks
        if self.axis.log:
            tens = range(math.ceil(self.first / math.log(10)), 99)
            found = [10.0**k for k in tens if math.log(10) * k <= self.last + 1e-9]
            return found if len(found) > 1 else [math.exp(self.first), math.exp(self.last)]
        return _round_marks(self.first, self.last)


@dataclass(frozen=True)
class Plot:
    """Lines with a point for each value or, with `groups`, bars side by side for each group.

    Attributes:
        key: unique on the page.
        guides: horizontal lines, by their names.
        note: stands under the plot.
        groups: names of the groups of bars; x of a bar is the index of its group.
    """

    key: str
    title: str
    description: str
    series: Sequence[Series]
    x: Axis
    y: Axis
    guides: Sequence[tuple[Number, str]] = ()
    note: str = ""
    groups: Sequence[str] = ()

    @cached_property
    def across(self) -> Scale:
        """The scale of x."""
        return Scale(self.x, [a for one in self.series for a, _ in one.points], LEFT, RIGHT)

    @cached_property
    def up(self) -> Scale:
        """The scale of y."""
        values = [b for one in self.series for _, b in one.points]
        return Scale(self.y, [*values, *(value for value, _ in self.guides)], BOTTOM, TOP)

    def places(self, one: Series) -> list[tuple[Number, Number]]:
        """The pixels of a line; a value beyond the limits of y is drawn at the edge."""
        return [(self.across(a), min(max(self.up(b), TOP), BOTTOM)) for a, b in one.points]

    def path(self, one: Series) -> str:
        """The line as an SVG path."""
        places = enumerate(self.places(one))
        return " ".join(f"{'L' if k else 'M'}{a:g} {b:g}" for k, (a, b) in places)

    def texts(self, one: Series) -> list[str]:
        """The values of a line as texts."""
        return [f"{self.x.label} {shown(a)}, {self.y.label} {shown(b)}" for a, b in one.points]

    def bars(self) -> Iterator[tuple[Series, dict[str, Number], str]]:
        """The bars, group by group, with their pixels and texts."""
        room = (RIGHT - LEFT) / max(1, len(self.groups))
        wide = min(36.0, 0.8 * room / max(1, len(self.series)))
        for place, group in enumerate(self.groups):
            for k, one in enumerate(self.series):
                for value in (b for a, b in one.points if a == place):
                    left, top = LEFT + (place + 0.5) * room, self.up(value)
                    left += (k - len(self.series) / 2) * wide
                    box = {"x": left + 1, "y": top, "width": wide - 2, "height": BOTTOM - top}
                    box["middle"] = left + wide / 2
                    text = f"{group}, {self.y.label} {shown(value)}"
                    yield one, {name: round(pixel, 1) for name, pixel in box.items()}, text

    def name_of_guide(self, value: Number, name: str) -> tuple[float, float]:
        """The left end and the base line of a guide's name, where the fewest lines pass.

        The name is above or below the guide; places on the right are tried first.
        """
        guide, wide = self.up(value), 8.0 * len(name)
        bases = [base for base in (guide - 5, guide + 14) if TOP + 9 <= base <= BOTTOM]
        room = RIGHT - wide - LEFT
        corners = [(LEFT + room * k / 4, base) for k in (4, 3, 2, 1, 0) for base in bases]
        shares = np.linspace(0, 1, 17)[:, None]
        lines = [np.array(self.places(one))[:, None] for one in self.series if one.points]
        parts = [line[:-1] + shares * (line[1:] - line[:-1]) for line in lines]
        x, y = np.concatenate([part.reshape(-1, 2) for part in parts]).T

        def passing(corner: tuple[float, float]) -> int:
            left, base = corner
            inside = (left - 4 <= x) & (x <= left + wide + 4) & (base - 15 <= y) & (y <= base + 5)
            return int(inside.sum())

        left, base = min(corners, key=passing)
        return round(left, 1), round(base, 1)


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
