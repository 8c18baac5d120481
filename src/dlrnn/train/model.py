"""The model of a run: as it begins, and at its best."""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from dlrnn.models import LanguageConfig, LanguageModel, build_model
from dlrnn.tasks import Task
from dlrnn.train.checkpoint import BEST, load_model, read
from dlrnn.train.config import RunConfig
from dlrnn.train.folder import RunFolder


def make_model(config: RunConfig, task: Task) -> nn.Module:
    """The model of a run, initialised from its seed."""
    torch.manual_seed(config.seed)
    if isinstance(config.model, LanguageConfig):
        return LanguageModel(config.model)
    model = build_model(
        config.model,
        d_input=task.d_input,
        vocabulary=task.vocabulary,
        d_output=task.d_output,
        pooled=task.pooled,
        pair=task.pair,
    )
    if task.causal and not getattr(model, "causal", True):
        raise ValueError(
            f"{task.name} asks for a model that reads from left to right: its mixer must not be"
            " bidirectional"
        )
    return model


class Best(NamedTuple):
    """The best model of a run so far, and the step that made it: a run that goes on may have
    another one since.
    """

    model: nn.Module
    task: Task
    config: RunConfig
    step: int


def load_best(path: str | Path, device: torch.device) -> Best:
    """To use it: on its device, not in training."""
    folder = RunFolder.open(path)
    config, best = folder.config, folder.path / BEST
    task = config.make_task()
    model = make_model(config, task)
    tensors, counters = read(best)
    load_model(best, tensors, model)
    return Best(model.to(device).eval(), task, config, int(counters["step"]))
