"""Table 1: the atomic tasks. R2 on 32 validation batches, the best of its evaluations.

Expect: one DLR layer solves Shift, CumSum, Select-Fixed and Solve-Fixed, gets about half of CumMax
and nothing else; one layer of attention solves CumSum, CumMax and most of MIPS; six DLR layers add
CumMax and Reverse and, at length 512, Solve and Select.
Hardware: the paper's was one 3090. On one H200 the 40000 steps of a DLR layer take half a minute,
of six 2.4 minutes, of DSS-exp 1, of attention 10 (fp32); twice that for Reverse and Sort, attention
36; at length 512 less than 1 (estimates: cost.py). The whole table: 3.6 hours, of which 2.6 are
attention's at length 4096; less with `--early-stop`.
"""

import math
from dataclasses import dataclass, replace

from dlrnn.models import ModelConfig
from dlrnn.paper.recipes.paper import table
from dlrnn.paper.recipes.recipe import Recipe, recipe
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

SETTINGS = {"shift": {"copies": 8}, "mips": {"width": 4}} | {
    name: {"marked": 32} for name in ("select", "select-fixed")
}


def _dlr(layers: int) -> ModelConfig:
    options = {"d_state": 4096, "dt_min": 1e-5, "dt_max": 1e-5}
    return ModelConfig("dlr", options, d_model=128, layers=layers, norm="post")


def _dss(layers: int) -> ModelConfig:
    options = {"d_state": 4096, "dt_min": 1e-4, "dt_max": 1e-2, "frequency_step": math.pi}
    return ModelConfig("dss", options, d_model=128, layers=layers, norm="post")


def _attention(layers: int) -> ModelConfig:
    return ModelConfig("attention", {"heads": 4}, d_model=128, layers=layers, norm="post")


@dataclass(frozen=True)
class Column:
    """A model at a length: all that its runs share. `place` is its column in paper.json."""

    place: int
    model: ModelConfig
    length: int
    lr: float
    batch_size: int
    steps: int

    def run(self, task: str) -> RunConfig:
        """Its run on a task: constant rate, no weight decay."""
        settings = {"length": self.length, **SETTINGS.get(task, {})}
        return RunConfig(
            TaskConfig(task, settings),
            self.model,
            steps=self.steps,
            batch_size=self.batch_size,
            lr=self.lr,
        )


COLUMNS = {
    "dlr-1": Column(0, _dlr(1), 4096, 1e-4, 16, 40_000),
    "dss-1": Column(1, _dss(1), 4096, 1e-3, 16, 40_000),
    "attention-1": Column(2, _attention(1), 4096, 1e-3, 16, 40_000),
    "dlr-6": Column(3, _dlr(6), 4096, 1e-4, 16, 40_000),
    "dlr-6-512": Column(4, _dlr(6), 512, 5e-5, 64, 11_000),
    "attention-2-512": Column(5, _attention(2), 512, 1e-3, 64, 11_000),
}
"""By their names: place in paper.json, model, length, rate, batch, steps."""

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
    """The paper's value."""
    return {"R2": float(table(paper_table)["columns"][column.place]["R2"][TASKS[task]])}


def _recipe(task: str, name: str, column: Column) -> Recipe:
    config, note = column.run(task), ""
    if task == "mips":
        lr = 1e-4 if column.model.mixer == "attention" else config.lr
        config, note = replace(config, batch_size=4, lr=lr), MIPS_NOTE
    paper = r2_of("table1_atomic", column, task)
    return recipe(f"table1/{task}/{name}", config, paper, NOTES.get(f"{task}/{name}", note))


RECIPES = [_recipe(task, name, column) for task in TASKS for name, column in COLUMNS.items()]
RECIPES += [
    _recipe("select-fixed", "dlr-1-works", replace(COLUMNS["dlr-1"], lr=4e-5)),
    _recipe("mips", "attention-1-longer", replace(COLUMNS["attention-1"], steps=160_000)),
]
