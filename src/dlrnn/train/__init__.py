"""Training: one loop for all tasks and models, exact when it is resumed."""

from dlrnn.train.config import RunConfig, TaskConfig, from_json, with_overrides
from dlrnn.train.folder import RunFolder
from dlrnn.train.loop import train
from dlrnn.train.model import load_best, make_model

__all__ = [
    "RunConfig",
    "RunFolder",
    "TaskConfig",
    "from_json",
    "load_best",
    "make_model",
    "train",
    "with_overrides",
]
