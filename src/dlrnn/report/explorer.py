"""The page on which visitors choose a run, a layer and a step; explorer.js draws them."""

import json
from collections.abc import Sequence
from typing import NamedTuple

from dlrnn.common.untrusted import COMPACT
from dlrnn.paper.comparison import Table
from dlrnn.paper.results import Results, thinned
from dlrnn.report.pages import runs_with

FEWER = (16, 12, 8, 7, 6, 5, 4, 3, 2)
"""Numbers of steps of each run, tried in this order until all runs fit."""


class Run(NamedTuple):
    """A run with snapshots of its layers, each step as JSON."""

    key: str  # the name of its file
    name: str  # its title
    cell: tuple[str, str, str]  # shared by its seeds
    steps: list[str]

    def script(self, steps: int) -> bytes:
        """The script that hands so many steps to explorer.js."""
        return f'dlrnnLayers("{self.key}",[{",".join(thinned(self.steps, steps))}]);\n'.encode()

    def size(self, steps: int) -> int:
        """An upper bound of the bytes of the script."""
        return sum(len(each) + 1 for each in thinned(self.steps, steps)) + len(self.key) + 40


def explorer_runs(results: Sequence[Results], tables: Sequence[Table]) -> list[Run]:
    """Every run that has snapshots."""
    return [
        Run(
            f"{place}-{record.stem}",
            name,
            (one.name, record.recipe, record.variant),
            [json.dumps(each, **COMPACT) for each in one.snapshots[record.stem]],
        )
        for place, (name, record, one) in enumerate(runs_with("snapshots", results, tables))
    ]


def fitted(runs: Sequence[Run], room: int) -> tuple[list[Run], int]:
    """The runs that fit into so many bytes, and the number of their steps.

    First all runs are tried, then one seed of each cell with fewer and fewer steps, then fewer
    runs.
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
    """The runs that do not fit, in a sentence; "" if all do."""
    shown = {run.cell for run in kept}
    missing = [run for run in runs if run not in kept]
    further = sum(run.cell in shown for run in missing)
    parts = [f"{further} further seeds of the runs that are shown"] if further else []
    parts += [run.name for run in missing if run.cell not in shown]
    return f"Left out to limit the size of the pages: {'; '.join(parts)}." if parts else ""
