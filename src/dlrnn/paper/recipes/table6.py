"""Table 6: attention with as many parameters as DLR (two feed-forward layers of width 2048).

Expect: Shift .69 at length 4096 and nothing else; at 512, with two layers, Shift, Select-Fixed and
Solve-Fixed.
Hardware: the paper used one 3090. On one H200 a run takes about 15 minutes at length 4096 (Reverse
and Sort 47) and 2 at 512 (estimates: cost.py). With `--precision bf16` a step at length 4096 takes
4.9 ms alone (11), so that a run should take 3 minutes (7); two runs at once made 221 steps a second
together.

The other settings are those of Table 1: the paper states no learning rate for this model other than
attention's.
"""

from functools import partial

from dlrnn.paper.numbers import table
from dlrnn.paper.recipes.recipe import Builders, Recipe, recipe
from dlrnn.paper.recipes.table1 import TASKS, Column, r2_of

COLUMNS = {
    "attention-ff-1": Column(0, "attention-ff", 1, 4096, 1e-3, 16, 40_000),
    "attention-ff-2-512": Column(1, "attention-ff", 2, 512, 1e-3, 64, 11_000),
}


def _recipe(task: str, name: str) -> Recipe:
    column = COLUMNS[name]
    paper = r2_of("table6_param_tied", column, task)
    return recipe(f"table6/{task}/{name}", column.run(task), paper)


BUILDERS: Builders = {
    f"table6/{task}/{name}": partial(_recipe, task, name)
    for task, title in TASKS.items()
    for name, column in COLUMNS.items()
    if title in table("table6_param_tied")["columns"][column.place]["R2"]
}
