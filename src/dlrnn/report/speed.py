"""The page of speed: time against length, and relative time per step."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dlrnn.paper.comparison import Table
from dlrnn.paper.results import Results, read_json
from dlrnn.report.html import Html, join, tag
from dlrnn.report.svg import Axis, Series, line_plot, shown
from dlrnn.report.tables import plain_table

DLR = {
    "fused": "DLR, our kernels",
    "torch": "DLR, plain PyTorch",
    "listing": "DLR, the paper's listing",
    "attention bf16": "attention, bf16, without projections",
    "ceiling": "ceiling for DLR: its bytes and FLOP at an H200's rates",
}
LAYERS = {
    "layer dss": "DSS-exp",
    "layer s4d": "S4D, N 64",
    "layer s4": "S4, N 64",
    "layer sgconv": "SGConv",
    "layer attention": "attention",
    "layer local-attention": "local attention, chunks of 1024",
    "layer attention-ff": "attention + 2 feed-forward",
}
"""What `bench lengths` calls the mixers beside DLR; in bf16 with " bf16" behind it."""

CEILING = (
    "The ceiling (dashed) is not measured: it is the time in which an H200 could do this layer's"
    " work if nothing else took any. Bytes: five passes over the activations at 4.3 TB/s, which its"
    " memory reaches. FLOP: 12 H N L to make the kernel and its gradients, at 263 TFLOP/s, a third"
    " of its 790 in 16 bits, because three such products make one of fp32's accuracy. The two are"
    " added. Kernels of this accuracy cannot be below it; how far above is what is left to win."
)
GREY = 4  # the style that is the ceiling's
NO_MIXERS = {"case", "B", "L", "goal", "authors"}


class Lengths(NamedTuple):
    """What `dlrnn bench lengths --json` measured: ms by length, by mixer."""

    device: str
    times: dict[str, list[tuple[float, float]]]


def read_lengths(path: str | Path, problems: list[str]) -> Lengths | None:
    """None if there is no such file."""
    return read_json(Path(path), _lengths, problems)


def _lengths(values: Any) -> Lengths:
    times: dict[str, list[tuple[float, float]]] = {}
    for row in values["cases"]:
        for name, value in row.items():
            measured = not name.endswith((" error", " GiB")) and name not in NO_MIXERS
            if measured and value is not None and 0 < float(value) < math.inf and row["L"] > 0:
                times.setdefault(str(name), []).append((float(row["L"]), float(value)))
    return Lengths(str(values["device"]), times)


def not_shown(path: str | Path) -> str:
    """What is said where no time against length can be drawn: where such a file comes from."""
    why = f"{path} holds none" if Path(path).is_file() else f"there is no {path} here"
    return (
        f"time against length is not shown: {why}; a clone of dlrnn has ours, and"
        " `dlrnn bench lengths --json` prints yours for --lengths FILE"
    )


def speed(
    tables: Sequence[Table], ours: Results, lengths: Lengths | None, path: str | Path
) -> Html:
    """Time against length (read from the path), and relative time per step."""
    said = not_shown(path)
    before, command, after = f"{said[0].upper()}{said[1:]}.".rsplit("`", 2)
    by_length: list[Html | None] = [tag("p", before, tag("code", command), after)]
    if (plot := length_plot(lengths)) is not None and lengths is not None:
        by_length = [plot, mixer_plot(lengths), _length_table(lengths)]
    return join(
        tag("h1", "Speed"),
        tag("h2", "Time against length"),
        tag(
            "p",
            "One layer, H 128, N 1024 where nothing else is said, forward and backward, 65536"
            " positions in sequences of one length, or one sequence where it is longer.",
            class_="lead",
        ),
        by_length,
        tag("h2", "Relative time per step"),
        tag(
            "p",
            "A training step beside one of DLR at the same length, and what the paper says of its"
            " own hardware.",
        ),
        _step_times(ours.step_times, tables),
    )


def title_of(name: str) -> str:
    """Of a name in lengths.json."""
    mixer = name.removesuffix(" bf16")
    if mixer in LAYERS:
        return LAYERS[mixer] + (", bf16" if mixer != name else "")
    return DLR.get(name, name)


def length_plot(lengths: Lengths | None) -> Html | None:
    """DLR by each backend, attention without projections, and the ceiling dashed."""
    if lengths is None:
        return None
    names = [name for name in dict.fromkeys((*DLR, *lengths.times)) if name in lengths.times]
    names = [name for name in names if not name.startswith("layer ")]
    title = f"Time of a layer against its length, {lengths.device}"
    return _plot("lengths", title, lengths, names, CEILING if "ceiling" in names else "")


def mixer_plot(lengths: Lengths) -> Html | None:
    """Whole layers of every mixer, DLR by the fastest backend, beside DLR's ceiling."""
    layers = [name for name in lengths.times if name.startswith("layer ")]
    dlr = next((name for name in ("fused", "torch") if name in lengths.times), None)
    names = [*filter(None, [dlr]), *layers, *(["ceiling"] if "ceiling" in lengths.times else [])]
    title = f"Time of a layer of every mixer against its length, {lengths.device}"
    return _plot("mixers", title, lengths, names) if layers else None


def _plot(key: str, title: str, lengths: Lengths, names: list[str], note: str = "") -> Html | None:
    series = [
        Series(title_of(name), lengths.times[name], GREY, dashed=True)
        if name == "ceiling"
        else Series(title_of(name), lengths.times[name], place + (place >= GREY))
        for place, name in enumerate(names)
    ]
    if not series:
        return None
    ticks = sorted({length for one in series for length, _ in one.points})
    ends = [f"{one.name} {shown(one.points[-1][1])} ms" for one in series]
    return line_plot(
        key,
        title,
        f"At the longest length of each: {', '.join(ends)}.",
        series,
        x=Axis("length", log=True, ticks=ticks[::2] if len(ticks) > 8 else ticks),
        y=Axis("ms", log=True),
        note=note,
    )


def _length_table(lengths: Lengths) -> Html:
    names = list(lengths.times)
    by_length: dict[float, dict[str, float]] = {}
    for name, points in lengths.times.items():
        for length, value in points:
            by_length.setdefault(length, {})[name] = value
    rows = [
        [shown(length), *(shown(values[n]) if n in values else "–" for n in names)]
        for length, values in sorted(by_length.items())
    ]
    head = ["length", *map(title_of, names)]
    table = plain_table("Milliseconds by length", head, rows)
    return tag("details", tag("summary", "The same as a table"), table)


def _in(precision: str, model: str) -> str:
    """What is not fp32 says so."""
    return model if precision == "fp32" else f"{model}, {precision}"


def _step_times(found: dict[str, Any] | None, tables: Sequence[Table]) -> Html:
    missing = tag(
        "p", "Not measured: there is no recorded ", tag("code", "dlrnn bench step --tables"), "."
    )
    if found is None:
        return missing
    names = ("L ms", "L", "L paper", "2L ms", "2L", "2L paper")
    head = ["model", "ms", "relative", "paper", "2L: ms", "2L: relative", "2L: paper"]
    titles = {name: title for table in tables for name, title in table.columns.items()}
    rows = [
        [
            _in(row["precision"], titles.get(row["model"], row["model"])),
            *("–" if row[n] is None else shown(row[n]) for n in names),
        ]
        for row in found["models"]
    ]
    told = f"{found['device']}, torch {found['torch']}; fp32 where nothing else is said."
    higher = [
        [
            row["task"],
            _in(row["precision"], row["model"]),
            *(shown(row[n]) for n in ("ms", "relative", "paper")),
        ]
        for row in found["table3"]
    ]
    columns = ["task", "model", "ms a step", "relative", "paper"]
    return join(
        tag("p", told, class_="quiet"),
        tag("h3", "Tables 1 and 6"),
        plain_table("Relative time per step, Tables 1 and 6", head, rows),
        tag("h3", "Table 3"),
        plain_table("Relative time per step, Table 3", columns, higher) if higher else missing,
    )
