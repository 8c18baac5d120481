"""Plots as inline SVG, drawn here; `report.js` shows the values of points under mouse and keys."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from dlrnn.report.html import Html, join, tag

WIDTH, HEIGHT = 480, 280
LEFT, RIGHT, TOP, BOTTOM = 46, 14, 30, 38
STYLES, DENSE = 9, 24  # colours that report.css knows; points of a line that are not drawn
SHAPES = (
    "m-3 0a3 3 0 1 0 6 0a3 3 0 1 0 -6 0",
    "m-3 -3h6v6h-6z",
    "m0 -4l4 4l-4 4l-4 -4z",
    "m0 -4l4 7h-8z",
    "m0 4l4 -7h-8z",
)
"""Of points: of 45 lines no two have the colour and the shape in common."""

Number = float | int


@dataclass(frozen=True)
class Series:
    """A line: its style is a colour and a shape of its points."""

    name: str
    points: Sequence[tuple[Number, Number]]
    style: int = 0
    dashed: bool = False

    @property
    def look(self) -> str:
        """Classes in report.css; where points are many they show only when one asks for them."""
        classes = {"dashed": self.dashed, "dense": self.dense}
        return " ".join(("line", f"s{self.style % STYLES}", *(c for c in classes if classes[c])))

    @property
    def dense(self) -> bool:
        """Too many points to draw each."""
        return len(self.points) > DENSE


@dataclass(frozen=True)
class Axis:
    """A direction of a plot; without `ticks` round numbers are found."""

    label: str
    log: bool = False
    limits: tuple[Number, Number] | None = None
    ticks: Sequence[Number] | None = None

    def scale(self, values: Sequence[Number], low: Number, high: Number) -> "Scale":
        """Onto pixels from low to high."""
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
        """Where numbers stand."""
        if self.ticks is not None:
            return list(self.ticks)
        if self.log:
            tens = range(math.ceil(scale.first / math.log(10)), 99)
            found = [10.0**k for k in tens if math.log(10) * k <= scale.last + 1e-9]
            return found if len(found) > 1 else [math.exp(scale.first), math.exp(scale.last)]
        return _round_marks(scale.first, scale.last)


@dataclass(frozen=True)
class Scale:
    """From values to pixels."""

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
) -> Html:
    """Lines with a point for each value; `guides` are horizontal lines with a name.

    `key` must be the plot's own on its page; `note` stands under it. A value beyond the limits of y
    is drawn at the edge and said as it is.
    """
    xs = [a for one in series for a, _ in one.points] or [0.0, 1.0]
    ys = [b for one in series for _, b in one.points] + [value for value, _ in guides]
    across = x.scale(xs, LEFT, WIDTH - RIGHT)
    up = y.scale(ys, HEIGHT - BOTTOM, TOP)
    parts = [_axes(x, y, across, up)]
    lines = [
        [(across(a), min(max(up(b), TOP), HEIGHT - BOTTOM)) for a, b in one.points]
        for one in series
    ]
    for value, name in guides:
        place = up(value)
        parts.append(tag("line", class_="guide", x1=LEFT, x2=WIDTH - RIGHT, y1=place, y2=place))
        left, base = _free_place(name, place, lines)
        parts.append(tag("text", name, class_="guide-name", x=left, y=base))
    for one, places in zip(series, lines, strict=True):
        path = " ".join(f"{'L' if k else 'M'}{a:g} {b:g}" for k, (a, b) in enumerate(places))
        line, names = tag("path", d=path), (x.label, y.label)
        parts.append(_many(one, line, names) if one.dense else _few(one, line, names, places))
    return _figure(key, title, description, parts, series, note=note)


def _free_place(
    name: str, guide: Number, lines: Sequence[Sequence[tuple[Number, Number]]]
) -> tuple[float, float]:
    """Where a guide's name begins, and its base: above or below, from right to left, where the
    fewest pieces of lines pass.
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
) -> Html:
    """Bars side by side for each group; a value of None has none."""
    values = [value for _, many in series for value in many if value is not None]
    up = Axis(y.label, limits=(0, max([*values, 1e-9]))).scale(values, HEIGHT - BOTTOM, TOP)
    room = (WIDTH - LEFT - RIGHT) / max(1, len(groups))
    wide = min(36.0, 0.8 * room / max(1, len(series)))
    parts = [_y_axis(y, up)]
    for place, group in enumerate(groups):
        middle = LEFT + (place + 0.5) * room
        parts.append(
            tag("text", group, class_="tick-x", x=round(middle, 1), y=HEIGHT - BOTTOM + 18)
        )
        for k, (name, many) in enumerate(series):
            value = many[place]
            if value is None:
                continue
            left, top = middle + (k - len(series) / 2) * wide, up(value)
            text = f"{group}, {y.label} {shown(value)}"
            bar = tag(
                "rect",
                x=round(left + 1, 1),
                y=top,
                width=round(wide - 2, 1),
                height=round(HEIGHT - BOTTOM - top, 1),
                data_t=text,
                data_x=round(left + wide / 2, 1),
                data_y=top,
            )
            parts.append(tag("g", bar, class_=f"bars s{k % STYLES}", data_n=name))
    legend = [Series(name, (), k) for k, (name, _) in enumerate(series)]
    return _figure(key, title, description, parts, legend)


def shown(value: Number) -> str:
    """Four digits; whole numbers as they are."""
    text = f"{value:.0f}" if float(value).is_integer() and abs(value) < 1e15 else f"{value:.4g}"
    return text.replace("-", "−")


def _figure(
    key: str,
    title: str,
    description: str,
    parts: list[Html],
    legend: Sequence[Series],
    *,
    note: str = "",
) -> Html:
    names = f"{key}-title {key}-desc"
    drawn = tag(
        "svg",
        tag("title", title, id=f"{key}-title"),
        tag("desc", description, id=f"{key}-desc"),
        parts,
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_labelledby=names,
    )
    keys = tag("output", class_="tip", hidden=True)
    how = f"{title}: left and right arrow keys read the values"
    plot = tag("div", drawn, keys, class_="plot", tabindex=0, role="group", aria_label=how)
    under = tag("p", note, class_="note") if note else None
    return tag("figure", plot, tag("figcaption", title, _legend(legend), under))


def _legend(entries: Sequence[Series]) -> Html | None:
    if len(entries) < 2:
        return None
    return tag("ul", [tag("li", _sample(one), one.name) for one in entries], class_="legend")


def _sample(one: Series) -> Html:
    if not one.points:  # of bars
        bar = tag("rect", x=8, y=0, width=12, height=12)
        return _swatch(tag("g", bar, class_=f"bars s{one.style % STYLES}"))
    line = tag("path", d="M1 6H27")
    point = tag("path", d=f"M14 6{SHAPES[one.style % len(SHAPES)]}", class_="point")
    return _swatch(tag("g", line, point, class_=one.look))


def _swatch(drawn: Html) -> Html:
    return tag("svg", drawn, aria_hidden="true", viewBox="0 0 28 12", width=28, height=12)


def _axes(x: Axis, y: Axis, across: Scale, up: Scale) -> Html:
    floor = HEIGHT - BOTTOM
    marks = [
        tag("text", _tick(mark), class_="tick-x", x=across(mark), y=floor + 16)
        for mark in x.marks(across)
    ]
    label = tag("text", x.label, class_="label-x", x=WIDTH - RIGHT, y=HEIGHT - 5)
    return join(_y_axis(y, up), marks, label)


def _y_axis(y: Axis, up: Scale) -> Html:
    marks = []
    for mark in y.marks(up):
        place = up(mark)
        marks.append(tag("line", class_="grid", x1=LEFT, x2=WIDTH - RIGHT, y1=place, y2=place))
        marks.append(tag("text", _tick(mark), class_="tick-y", x=LEFT - 6, y=round(place + 4, 1)))
    return join(marks, tag("text", y.label, class_="label-y", x=2, y=14))


def _few(
    one: Series, line: Html, names: tuple[str, str], places: Sequence[tuple[Number, Number]]
) -> Html:
    """A line and its points."""
    points = []
    for (across, up), (a, b) in zip(places, one.points, strict=True):
        text = f"{names[0]} {shown(a)}, {names[1]} {shown(b)}"
        shape = f"M{across:g} {up:g}{SHAPES[one.style % len(SHAPES)]}"
        points.append(tag("path", d=shape, class_="point", data_t=text, data_x=across, data_y=up))
    return tag("g", line, points, class_=one.look, data_n=one.name)


def _many(one: Series, line: Html, names: tuple[str, str]) -> Html:
    """A line and its values; `report.js` makes points of them when one asks."""
    values = ";".join(f"{shown(a)} {shown(b)}" for a, b in one.points)
    labels = {"data_n": one.name, "data_a": names[0], "data_b": names[1], "data_v": values}
    return tag("g", line, class_=one.look, **labels)


def _round_marks(first: Number, last: Number, about: int = 5) -> list[Number]:
    """Multiples of 1, 2 or 5 times a power of ten."""
    size = (last - first) / about
    power = 10.0 ** math.floor(math.log10(size))
    step = next(power * k for k in (1, 2, 5, 10) if power * k >= size * 0.999)
    start = math.ceil(first / step - 1e-9)
    return [k * step for k in range(start, math.floor(last / step + 1e-9) + 1)]


def _tick(value: Number) -> str:
    """Short: "40k", "2^14" for powers of two from 256 on, "0.2"."""
    whole = int(value)
    if value == whole and whole >= 256 and whole & (whole - 1) == 0:
        power = str(whole.bit_length() - 1).translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))
        return f"2{power}"
    if abs(value) >= 1000 and value == whole and whole % 100 == 0:
        return f"{value / 1000:g}k"
    return f"{value:.3g}".replace("-", "−")
