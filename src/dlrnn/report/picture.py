"""Table 1 as a picture: each cell has the paper's R2 and ours; darker means higher."""

import io
import textwrap
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from dlrnn.paper.comparison import NOT_RUN, Cell, Table, our_number, paper_number, range_text
from dlrnn.paper.counts import count_text
from dlrnn.paper.results import Results
from dlrnn.paper.tables import make_tables

SHADES = LinearSegmentedColormap.from_list("R2", ("#f4f7fa", "#7fb2dd", "#0b4f93"))
QUIET, INK, RED = "#56606b", "#1c2126", "#b04a12"
HEIGHT, GAP = 0.86, 0.04  # of a cell; between its halves


def table1_png(results: Sequence[Results]) -> bytes:
    """The picture as PNG; equal results give equal bytes."""
    content = io.BytesIO()
    table1_figure(results).savefig(content, dpi=120, metadata={"Software": None})
    return content.getvalue()


def table1_figure(results: Sequence[Results]) -> Figure:
    """The picture as a figure of matplotlib."""
    table = make_tables(results)[0]
    columns, rows = list(table.columns), list(table.rows)
    figure = Figure(figsize=(10.5, 0.42 * len(rows) + 2.0), layout="constrained")
    axes: Axes = figure.subplots()
    for down, row in enumerate(rows):
        for across, column in enumerate(columns):
            if (cell := table.at(row, column)) is not None:
                _draw(axes, across, down, cell)
    axes.set_xlim(-0.5, len(columns) - 0.5)
    axes.set_ylim(len(rows) - 0.5, -0.75)
    titles = [title.replace(", ", "\n", 1) for title in table.columns.values()]
    axes.set_xticks(range(len(columns)), titles)
    axes.set_yticks(range(len(rows)), list(table.rows.values()))
    axes.tick_params(length=0, labeltop=True, labelbottom=False)
    axes.spines[:].set_visible(False)
    for across in range(len(columns)):
        for place, name in ((-0.24, "paper"), (0.24, "ours")):
            axes.text(across + place, -0.6, name, ha="center", fontsize=8, color=QUIET)
    axes.set_title("Validation R2 on the atomic tasks (Table 1)", loc="left", pad=12)
    axes.set_xlabel(_below(table), fontsize=8.5, color=QUIET, loc="left")
    return figure


def _draw(axes: Axes, across: int, down: int, cell: Cell) -> None:
    """Draw the paper's half of a cell and ours with its range, and a frame if they differ."""
    seeds = cell.ours.get("R2")
    mean = None if seeds is None else seeds.mean
    ours = our_number(seeds) if mean is None else f"{mean:z.2f}"
    ours += "*" if seeds is not None and not seeds.is_comparable else ""
    _half(axes, across - 0.24, down, cell.paper.get("R2"), paper_number(cell, "R2"))
    below = "" if seeds is None else range_text(seeds).replace(" to ", "–")
    _half(axes, across + 0.24, down, mean, f"{ours}\n{below}")
    if cell.verdict() in ("better", "worse", "apart"):
        corner = (across - 0.48, down - HEIGHT / 2)
        axes.add_patch(Rectangle(corner, 0.96, HEIGHT, fill=False, edgecolor=RED, linewidth=1.6))


def _half(axes: Axes, middle: float, down: int, value: float | None, text: str) -> None:
    share = 0.0 if value is None else min(1.0, max(0.0, value))
    width = 0.48 - GAP / 2
    box = Rectangle((middle - width / 2, down - HEIGHT / 2), width, HEIGHT)
    box.set(facecolor="none" if value is None else SHADES(share), linewidth=0.6)
    box.set(edgecolor="#d9dfe5", linestyle="--" if value is None else "-")
    axes.add_patch(box)
    small = text.startswith((NOT_RUN, "diverged"))
    colour = QUIET if small else "white" if share > 0.55 else INK
    size = 7.5 if small else 9
    look: dict[str, Any] = {"ha": "center", "va": "center", "color": colour}
    text, _, below = text.partition("\n")
    axes.text(middle, down - (0.14 if below else 0), text, fontsize=size, **look)
    axes.text(middle, down + 0.24, below, fontsize=6, **look)


def _below(table: Table) -> str:
    """The meaning of the marks in the picture."""
    parts = [count_text(table)]
    measured = [cell for cell in table.grid if "R2" in cell.ours]
    if any(not cell.ours["R2"].is_comparable for cell in measured):
        parts.append("* fewer steps than the recipe's.")
    if any(cell.verdict() in ("better", "worse", "apart") for cell in measured):
        parts.append(
            "Framed: not as in the paper (more than .03 above or below it, or no seed is)."
        )
    return "\n" + "\n".join(textwrap.wrap(" ".join(parts), 150))
