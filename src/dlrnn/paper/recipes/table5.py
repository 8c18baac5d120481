"""Table 5: language modelling on PG-19. Cross-entropy in nats a token, train / test.

Expect: DLR 2.71 / 2.88 with 16 experts and 2.44 / 2.84 with 64 (pre-norm), about the same with
post-norm; the Transformer 2.88 / 2.90 with one, 2.52 / 2.63 with 16, 2.36 / 2.58 with 64, and
diverged with post-norm: the paper's loss is infinite here, and a run agrees if its own is not
finite. The test loss is the best checkpoint's.
Hardware: the paper used three A100 (40 GiB) for a day. On one H200 a run takes about 13 hours with
DLR and 24 with attention (estimates: cost.py).

The runs need the data set: `dlrnn data import pg19 PATH --tokenizer FILE`. Experts are chosen over
whole sequences, as in the paper, so that they see later tokens: docs/language.md measures it. The
paper does not state, and these recipes choose: a cosine schedule after a warm-up of 2% of the steps
as in Table 4, bf16, gradients clipped at norm 1. Five micro-batches of 24 sequences fit on one GPU,
of 8 on three.
"""

import math
from functools import partial

from dlrnn.models import LanguageConfig
from dlrnn.models.config import Norm
from dlrnn.models.language import LanguageMixer
from dlrnn.paper.numbers import table
from dlrnn.paper.recipes.recipe import recipe
from dlrnn.train import RunConfig, TaskConfig

MODELS: dict[str, LanguageMixer] = {"DLR": "dlr", "Transformer": "attention"}
NORMS: dict[str, Norm] = {"pre_norm": "pre", "post_norm": "post"}
STEPS, EPOCHS = 60_000, 10
DIVERGED = (math.inf, math.inf)
"""The losses of the runs that diverged in the paper."""


def _config(mixer: LanguageMixer, experts: int, norm: Norm) -> RunConfig:
    return RunConfig(
        TaskConfig("pg19", {"length": 4096, "folder": "data/pg19"}),
        LanguageConfig(mixer, experts, norm=norm),
        steps=STEPS,
        batch_size=120,
        lr=1e-3,
        kernel_lr=2e-4,
        weight_decay=0.1,
        schedule="cosine",
        warmup=STEPS // 50,
        clip=1.0,
        accumulate=5,
        precision="bf16",
        eval_every=STEPS // EPOCHS,
    )


RECIPES = [
    recipe(
        f"table5/pg19/{MODELS[row['model']]}-{row['experts']}-{norm}",
        partial(_config, MODELS[row["model"]], row["experts"], norm),
        dict(zip(("train_loss", "loss"), row[column] or DIVERGED, strict=True)),
    )
    for row in table("table5_language_model")["rows"]
    for column, norm in NORMS.items()
]
