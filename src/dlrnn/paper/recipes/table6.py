"""Table 6: attention with as many parameters as DLR (two feed-forward layers of width 2048).

Expect: Shift .69 at length 4096 and nothing else; at 512, with two layers, Shift, Select-Fixed and
Solve-Fixed.
Hardware: the paper's was one 3090. On one H200 about 15 minutes a run at length 4096 (Reverse and
Sort 47) and 2 at 512 (estimates: cost.py); with `--precision bf16` a step at 4096 takes 4.9 ms
alone (11), so that a run should take 3 minutes (7); two at once made 221 steps a second together.

The rest is as in Table 1: the paper states no other rate for it than attention's.
"""

from dlrnn.models import ModelConfig
from dlrnn.paper.recipes.paper import table
from dlrnn.paper.recipes.recipe import recipe
from dlrnn.paper.recipes.table1 import TASKS, Column, r2_of


def _attention(layers: int) -> ModelConfig:
    options = {"heads": 4, "d_ff": 2048}
    return ModelConfig("attention-ff", options, d_model=128, layers=layers, norm="post")


COLUMNS = {
    "attention-ff-1": Column(0, _attention(1), 4096, 1e-3, 16, 40_000),
    "attention-ff-2-512": Column(1, _attention(2), 512, 1e-3, 64, 11_000),
}

RECIPES = [
    recipe(f"table6/{task}/{name}", column.run(task), r2_of("table6_param_tied", column, task))
    for task, title in TASKS.items()
    for name, column in COLUMNS.items()
    if title in table("table6_param_tied")["columns"][column.place]["R2"]
]
