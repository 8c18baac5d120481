"""The explorer: pick a run, a layer and a step; explorer.js draws."""

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dlrnn.paper.comparison import Table
from dlrnn.paper.results import Results, thinned
from dlrnn.report.html import Html, join, tag
from dlrnn.report.pages import runs_with

FEWER = (16, 12, 8, 7, 6, 5, 4, 3, 2)
"""Steps of each run, tried in this order until all fit."""


class Run(NamedTuple):
    """One whose layers were kept, each step already as JSON."""

    key: str  # of its file
    name: str  # to show
    cell: tuple[str, str, str]  # all its seeds have it
    steps: list[str]

    def script(self, steps: int) -> bytes:
        """That hands the layers to explorer.js, of so many steps."""
        return f'dlrnnLayers("{self.key}",[{",".join(thinned(self.steps, steps))}]);\n'.encode()

    def size(self, steps: int) -> int:
        """Bytes of it, or a few more."""
        return sum(len(each) + 1 for each in thinned(self.steps, steps)) + len(self.key) + 40


def explorer_runs(results: Sequence[Results], tables: Sequence[Table]) -> list[Run]:
    """Every run that has layers to show."""
    return [
        Run(
            f"{place}-{record.stem}",
            name,
            (one.name, record.recipe, record.variant),
            [json.dumps(each, separators=(",", ":")) for each in one.snapshots[record.stem]],
        )
        for place, (name, record, one) in enumerate(runs_with("snapshots", results, tables))
    ]


def fitted(runs: Sequence[Run], room: int) -> tuple[list[Run], int]:
    """The runs, and how many steps of each, that fit into so many bytes.

    First all of them; then one seed a cell, with fewer and fewer steps; then fewer runs.
    """
    one_seed = list({run.cell: run for run in reversed(runs)}.values())[::-1]
    for kept, steps in [(list(runs), FEWER[0]), *((one_seed, steps) for steps in FEWER)]:
        if sum(run.size(steps) for run in kept) <= room:
            return kept, steps
    kept = []
    for run in sorted(one_seed, key=lambda run: run.size(FEWER[-1])):
        room -= run.size(FEWER[-1])
        kept += [run] if room >= 0 else []
    return [run for run in one_seed if run in kept], FEWER[-1]


def left_out(runs: Sequence[Run], kept: Sequence[Run]) -> str:
    """In a sentence; "" if nothing is."""
    shown = {run.cell for run in kept}
    missing = [run for run in runs if run not in kept]
    further = sum(run.cell in shown for run in missing)
    parts = [f"{further} further seeds of what is shown"] if further else []
    parts += [run.name for run in missing if run.cell not in shown]
    return f"Left out, for the size of the pages: {'; '.join(parts)}." if parts else ""


def explorer(runs: Mapping[str, str], missing: str) -> Html:
    """The page; names to show by the key of their file."""
    head = join(
        tag("h1", "Explorer: a trained layer"),
        tag(
            "p",
            "Eigenvalues, kernels and impulse response of a layer while it learns.",
            class_="lead",
        ),
        tag("p", missing, class_="quiet") if missing else None,
    )
    if not runs:
        return join(head, tag("p", "There are no snapshots of trained layers to show."))
    options = [tag("option", name, value=key) for key, name in runs.items()]
    return join(
        head,
        tag(
            "div",
            tag("label", "Run ", tag("select", options, id="run")),
            tag("label", "Layer ", tag("select", id="layer")),
            tag("div", tag("label", "Training step", for_="step"), " ",
                tag("output", id="step-shown", for_="step"),
                tag("div",
                    tag("input", id="step", type="range", min=0, max=0, value=0),
                    tag("div", tag("span"), tag("span"), class_="ends", aria_hidden="true"),
                    id="steps", hidden=True)),
            class_="controls",
        ),
        tag("p", id="layer-facts", class_="quiet", aria_live="polite"),
        tag("div", id="explorer", class_="plots"),
        tag("noscript", "The explorer draws in the browser and needs JavaScript."),
        tag("script", src="explorer.js", defer=True),
    )  # fmt: skip
