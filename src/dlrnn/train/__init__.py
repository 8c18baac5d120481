"""Training: one loop for all tasks and models, with exact resume."""

from dlrnn.train.checkpoint import load_best, make_model
from dlrnn.train.config import RunConfig, TaskConfig, from_json, with_overrides
from dlrnn.train.defaults import default_run
from dlrnn.train.run_directory import RunDirectory
from dlrnn.train.trainer import train

__all__ = [
    "RunConfig",
    "RunDirectory",
    "TaskConfig",
    "default_run",
    "from_json",
    "load_best",
    "make_model",
    "train",
    "with_overrides",
]
