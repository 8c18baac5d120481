"""Table 2: Shift, one layer, at lengths up to a million. R2, the best of all evaluations.

Expect: DLR and SGConv (N or d = 4096) fall from .8 to .9 at length 16384 to .2 at a million, and
DLR-prod stays at .98 up to 262144 and gets .78 at a million; .22 is the copy that is not
shifted, 8/36. DLR-R fails at 256 already (by dt_min = dt_max its lambdas begin equal).
Hardware: the paper used one 3090. On one H200, 86000 steps of DLR take about 1 minute at 16384,
8 at 262144 and 32 at a million; DSS-exp three times as long (estimates: cost.py).

H = 32, batch 4, post-norm, constant rate. Kernels are as long as the input.
"""

import math
from functools import partial
from typing import Any

from dlrnn.models import ModelConfig
from dlrnn.paper.numbers import row_of
from dlrnn.paper.recipes.recipe import Recipe, recipe
from dlrnn.train import RunConfig, TaskConfig

LENGTHS = (16_384, 65_536, 262_144, 1_048_576)
CLAIMED = 524_288
"""The length of a claim of the text."""
SLOW_DECAY = {"dt_min": 1e-5, "dt_max": 1e-5}
DSS_STEPS = {"dt_min": 1e-4, "dt_max": 1e-2}

MODELS: dict[str, tuple[str, str, dict[str, Any], float]] = {
    "dlr": ("DLR", "dlr", {"d_state": 4096, **SLOW_DECAY}, 1e-5),
    "dlr-prod": ("DLR-prod", "dlr", {"d_state": 4096, "cast": "prod", **SLOW_DECAY}, 1e-5),
    "dss": ("DSS-exp", "dss", {"d_state": 4096, "frequency_step": math.pi, **DSS_STEPS}, 1e-3),
    "sgconv": ("SGConv", "sgconv", {"d_kernel": 4096, "decay": 1.0}, 1e-5),
    "dlr-n512": ("DLR, N=512", "dlr", {"d_state": 512, **SLOW_DECAY}, 1e-5),
    "dlr-r": ("DLR-R", "dlr", {"d_state": 4096, "real": True, **SLOW_DECAY}, 1e-5),
}
"""By our name: the paper's name, the mixer, its options, the learning rate."""


def _config(name: str, length: int) -> RunConfig:
    _, mixer, options, lr = MODELS[name]
    if mixer == "sgconv":
        options = {"length": length, **options}
    return RunConfig(
        TaskConfig("shift", {"length": length, "copies": 8}),
        ModelConfig(mixer, options, d_model=32, layers=1, norm="post"),
        steps=86_000,
        batch_size=4,
        lr=lr,
    )


def _recipe(name: str, length: int) -> Recipe:
    paper = {"R2": float(row_of("table2_shift_scale", MODELS[name][0])["R2"][str(length)])}
    note = "the paper states 920K parameters, which is right at length 262144 alone"
    return recipe(
        f"table2/{length}/{name}",
        partial(_config, name, length),
        paper,
        note if name == "sgconv" else "",
    )


RECIPES = [_recipe(name, length) for length in LENGTHS for name in MODELS if name != "dlr-r"]
RECIPES.append(_recipe("dlr-r", 256))
RECIPES.append(
    recipe(
        f"table2/{CLAIMED}/dlr-prod",
        partial(_config, "dlr-prod", CLAIMED),
        {"R2": 1.0},
        "a claim of the paper's text, which is in no table: a DLR layer shifts an input of half a"
        " million positions perfectly; the settings are those of DLR-prod at the other lengths",
    )
)
