"""Table 1: the atomic tasks. R2 on 32 validation batches, the best of all evaluations.

Expect: one DLR layer solves Shift, CumSum, Select-Fixed and Solve-Fixed, gets about half of CumMax
and nothing else; one layer of attention solves CumSum, CumMax and most of MIPS; six DLR layers add
CumMax and Reverse and, at length 512, Solve and Select.
Hardware: the paper used one 3090. On one H200, 40000 steps of one DLR layer take half a minute, of
six 2.4 minutes, of DSS-exp 1 and of attention 10 (fp32); Reverse and Sort take twice as long, and
36 minutes with attention; runs at length 512 take less than 1 (estimates: cost.py). The whole table
takes 3.6 hours, of which attention at length 4096 takes 2.6; `--early-stop` makes it shorter.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from dlrnn.models import ModelConfig
from dlrnn.paper.numbers import table
from dlrnn.paper.recipes.recipe import Builders, Recipe, recipe
from dlrnn.train import RunConfig, TaskConfig

TASKS = {
    "shift": "Shift",
    "cumsum": "CumSum",
    "cummax": "CumMax",
    "select-fixed": "Select-Fixed",
    "solve-fixed": "Solve-Fixed",
    "reverse": "Reverse",
    "solve": "Solve",
    "select": "Select",
    "sort": "Sort",
    "context-shift": "ContextShift",
    "mips": "MIPS",
}
"""Our names of the tasks, and the paper's, in its order."""

SETTINGS = {
    "shift": {"copies": 8},
    "mips": {"width": 4},
    "select": {"marked": 32},
    "select-fixed": {"marked": 32},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "dlr": {"d_state": 4096, "dt_min": 1e-5, "dt_max": 1e-5},
    "dss": {"d_state": 4096, "dt_min": 1e-4, "dt_max": 1e-2, "frequency_step": math.pi},
    "attention": {"heads": 4},
    "attention-ff": {"heads": 4, "d_ff": 2048},
}


@dataclass(frozen=True)
class Column:
    """What the runs of a column share. `place` is the index of the column in paper.json."""

    place: int
    mixer: str
    layers: int
    length: int
    lr: float
    batch_size: int
    steps: int

    def run(self, task: str) -> RunConfig:
        """The run on a task: constant learning rate, no weight decay."""
        return RunConfig(
            TaskConfig(task, {"length": self.length, **SETTINGS.get(task, {})}),
            ModelConfig(self.mixer, OPTIONS[self.mixer], 128, self.layers, norm="post"),
            steps=self.steps,
            batch_size=self.batch_size,
            lr=self.lr,
        )


COLUMNS = {
    "dlr-1": Column(0, "dlr", 1, 4096, 1e-4, 16, 40_000),
    "dss-1": Column(1, "dss", 1, 4096, 1e-3, 16, 40_000),
    "attention-1": Column(2, "attention", 1, 4096, 1e-3, 16, 40_000),
    "dlr-6": Column(3, "dlr", 6, 4096, 1e-4, 16, 40_000),
    "dlr-6-512": Column(4, "dlr", 6, 512, 5e-5, 64, 11_000),
    "attention-2-512": Column(5, "attention", 2, 512, 1e-3, 64, 11_000),
}

MIPS_NOTE = (
    "MIPS has batch 4, and attention the rate 1e-4; the authors' configuration also takes 4 times"
    " the samples an epoch, which may mean more steps than the table says: these are the table's"
)
NOTES = {
    "select-fixed/dlr-1": "the stated rate gave .75 and .67 here, not the paper's .97:"
    " table1/select-fixed/dlr-1-works does what the paper reports",
    "select-fixed/dlr-1-works": "not the stated rate, 1e-4, but one that reaches the paper's"
    " value: 4e-5",
    "mips/attention-1": f"{MIPS_NOTE}; table1/mips/attention-1-longer has more",
    "mips/attention-1-longer": "not the table's 40000 steps, but four times as many",
}


def r2_of(paper_table: str, column: Column, task: str) -> dict[str, float]:
    """The paper's R2 of a task."""
    return {"R2": float(table(paper_table)["columns"][column.place]["R2"][TASKS[task]])}


def _recipe(task: str, name: str, column: Column) -> Recipe:
    config, note = column.run(task), ""
    if task == "mips":
        lr = 1e-4 if column.mixer == "attention" else config.lr
        config, note = replace(config, batch_size=4, lr=lr), MIPS_NOTE
    paper = r2_of("table1_atomic", column, task)
    return recipe(f"table1/{task}/{name}", config, paper, NOTES.get(f"{task}/{name}", note))


_RUNS = [(task, name, column) for task in TASKS for name, column in COLUMNS.items()]
_RUNS += [
    ("select-fixed", "dlr-1-works", replace(COLUMNS["dlr-1"], lr=4e-5)),
    ("mips", "attention-1-longer", replace(COLUMNS["attention-1"], steps=160_000)),
]
BUILDERS: Builders = {f"table1/{run[0]}/{run[1]}": partial(_recipe, *run) for run in _RUNS}
