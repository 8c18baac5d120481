"""The page on speed: time against length, and relative time per step."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dlrnn.common.untrusted import parse_json
from dlrnn.paper.comparison import Table
from dlrnn.paper.results import STEP_COLUMNS, TABLE3_COLUMNS, Results, read_file
from dlrnn.report.plots import Axis, Plot, Series, shown
from dlrnn.report.templates import render

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
"""The names of the other mixers in `bench lengths`; those in bf16 end with " bf16"."""

CEILING = (
    "The ceiling (dashed) is not measured: it is the least time of an H200 for the work of this"
    " layer. Bytes: five passes over the activations at 4.3 TB/s, which its memory reaches. FLOP:"
    " 12 H N L to make the kernel and its gradients, at 263 TFLOP/s, a third of its 790 in 16 bits,"
    " because three such products make one of fp32's accuracy. The two times are added. Kernels of"
    " this accuracy cannot be faster."
)
GREY = 4  # the style of the ceiling
NO_MIXERS = {"case", "B", "L", "goal", "authors"}


class Lengths(NamedTuple):
    """The output of `dlrnn bench lengths --json`: (length, ms) by mixer."""

    device: str
    times: dict[str, list[tuple[float, float]]]


def read_lengths(path: str | Path, problems: list[str]) -> Lengths | None:
    """Read the output of `dlrnn bench lengths --json`; None if there is no file."""
    return read_file(Path(path), _lengths, problems, links=True)


def _lengths(content: bytes) -> Lengths:
    values = parse_json(content, "it")
    times: dict[str, list[tuple[float, float]]] = {}
    for row in values["cases"]:
        for name, value in row.items():
            measured = not name.endswith((" error", " GiB")) and name not in NO_MIXERS
            if measured and value is not None and 0 < float(value) < math.inf and row["L"] > 0:
                times.setdefault(str(name), []).append((float(row["L"]), float(value)))
    return Lengths(str(values["device"]), times)


def not_shown(path: str | Path) -> str:
    """Why time against length is not shown, and where such a file comes from."""
    why = f"{path} holds none" if Path(path).is_file() else f"there is no {path} here"
    return (
        f"time against length is not shown: {why}; a clone of dlrnn has ours, and"
        " `dlrnn bench lengths --json` prints yours for --lengths FILE"
    )


def speed(
    tables: Sequence[Table],
    ours: Results,
    lengths: Lengths | None,
    path: str | Path,
    problems: Sequence[str],
) -> str:
    """The page; `path` is the file of the lengths."""
    said = not_shown(path)
    told = f"{said[0].upper()}{said[1:]}."
    times, titles = ours.step_times, {k: t for table in tables for k, t in table.columns.items()}
    language = {  # with pre-norm and post-norm a step takes as long
        key.removesuffix("-pre"): title.removesuffix(", pre-norm")
        for table in tables
        for key, title in table.rows.items()
        if table.name == "table5"
    }
    return render(
        "speed",
        page="speed",
        problems=problems,
        lengths_plot=length_plot(lengths),
        mixers_plot=lengths and mixer_plot(lengths),
        length_table=lengths and _length_table(lengths),
        not_shown=told.rsplit("`", 2),
        times=times,
        step_rows=times and [_times(row, titles, *STEP_COLUMNS) for row in times["models"]],
        table3_rows=times
        and [[row["task"], *_times(row, {}, *TABLE3_COLUMNS)] for row in times["table3"]],
        table5_rows=times and [_times(row, language, *TABLE3_COLUMNS) for row in times["table5"]],
    )


def title_of(name: str) -> str:
    """The title of a name in lengths.json."""
    mixer = name.removesuffix(" bf16")
    if mixer in LAYERS:
        return LAYERS[mixer] + (", bf16" if mixer != name else "")
    return DLR.get(name, name)


def length_plot(lengths: Lengths | None) -> Plot | None:
    """DLR with each backend, attention without projections, and DLR's ceiling, dashed."""
    if lengths is None:
        return None
    names = [name for name in dict.fromkeys((*DLR, *lengths.times)) if name in lengths.times]
    names = [name for name in names if not name.startswith("layer ")]
    title = f"Time of a layer against its length, {lengths.device}"
    return _plot("lengths", title, lengths, names, CEILING if "ceiling" in names else "")


def mixer_plot(lengths: Lengths) -> Plot | None:
    """Whole layers of every mixer, DLR with its fastest backend, and DLR's ceiling."""
    layers = [name for name in lengths.times if name.startswith("layer ")]
    if not layers:
        return None
    dlr = [name for name in ("fused", "torch") if name in lengths.times][:1]
    names = [*dlr, *layers, *(name for name in lengths.times if name == "ceiling")]
    title = f"Time of a layer of every mixer against its length, {lengths.device}"
    return _plot("mixers", title, lengths, names)


def _plot(key: str, title: str, lengths: Lengths, names: list[str], note: str = "") -> Plot | None:
    if not names:
        return None
    series = []
    for place, name in enumerate(names):
        style = GREY if name == "ceiling" else place + (place >= GREY)
        dashed = name == "ceiling"
        series.append(Series(title_of(name), lengths.times[name], style, dashed))
    ticks = sorted({length for one in series for length, _ in one.points})
    ends = [f"{one.name} {shown(one.points[-1][1])} ms" for one in series]
    return Plot(
        key,
        title,
        f"At the longest length of each: {', '.join(ends)}.",
        series,
        x=Axis("length", log=True, ticks=ticks[::2] if len(ticks) > 8 else ticks),
        y=Axis("ms", log=True),
        note=note,
    )


def _length_table(lengths: Lengths) -> list[list[str]]:
    """The titles, then a row for each length."""
    by_name = [dict(points) for points in lengths.times.values()]
    every = sorted({length for values in by_name for length in values})
    rows = [[shown(n), *(_shown(values.get(n)) for values in by_name)] for n in every]
    return [["length", *map(title_of, lengths.times)], *rows]


def _times(row: dict[str, Any], titles: dict[str, str], *names: str) -> list[str]:
    """The title of a model, with the precision unless it is fp32, and its times."""
    precision = "" if row["precision"] == "fp32" else f", {row['precision']}"
    title = titles.get(row["model"], row["model"])
    return [f"{title}{precision}", *(_shown(row[name]) for name in names)]


def _shown(value: float | None) -> str:
    return "–" if value is None else shown(value)
