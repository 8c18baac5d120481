"""The run of a task for which there is no recipe: the defaults of `dlrnn train --task`."""

from dlrnn.models import LanguageConfig, ModelConfig
from dlrnn.tasks import get, task_class
from dlrnn.train.config import RunConfig, TaskConfig


def default_run(task: str) -> RunConfig:
    """A small DLR on a task, by its name or import path: minutes on a CPU, not a tuned run."""
    kind = task_class(task)
    model: ModelConfig | LanguageConfig
    if kind.kind == "language":
        model = LanguageConfig(
            experts=1,
            layers=2,
            d_model=64,
            d_state=64,
            d_embedding=64,
            d_ff=256,
            vocabulary=get(task).vocabulary or LanguageConfig.vocabulary,
            kernel_length=None,
            heads=2,
            d_head=32,
        )
    else:
        direction = {} if kind.causal else {"bidirectional": True}
        model = ModelConfig("dlr", {"d_state": 256, **direction}, d_model=64, layers=2)
    return RunConfig(
        task=TaskConfig(task),
        model=model,
        steps=2000,
        batch_size=16,
        schedule="cosine",
        warmup=50,
        eval_every=250,
        eval_batches=8,
        checkpoint_every=250,
    )
