"""The model of a run: as it begins, and at its best."""

import os
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from dlrnn._untrusted import check_import, naming_file
from dlrnn.models import LanguageConfig, LanguageModel, ModelConfig, build_model
from dlrnn.models.config import MIXERS
from dlrnn.tasks import Task
from dlrnn.train.checkpoint import BEST, load_model, read
from dlrnn.train.config import RunConfig
from dlrnn.train.folder import CONFIG, RunFolder


def make_model(config: RunConfig, task: Task) -> nn.Module:
    """The model of a run, initialised from its seed; one that cannot fit in memory is refused."""
    _check_memory(config, task)
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


def _check_memory(config: RunConfig, task: Task) -> None:
    """Refuse a model whose parameters, or one activation of it, exceed this machine's memory."""
    model = config.model
    numbers = config.batch_size // config.accumulate * task.input_length * model.d_model
    if isinstance(model, LanguageConfig) or model.mixer in MIXERS:
        with torch.device("meta"):
            mixer = model.make_mixer()
        size = sum(each.numel() for each in mixer.state_dict().values())
        numbers = max(numbers, size * model.layers)
    memory = _memory()
    if memory is not None and 4 * numbers > memory:
        needed, there = (f"{value / 2**30:.3g} GiB" for value in (4 * numbers, memory))
        raise ValueError(f"the model needs at least {needed}, and this machine has {there}")


def _memory() -> int | None:
    """Bytes of this machine; None where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def check_trusted(config: RunConfig, where: Path, *, trust: bool) -> None:
    """Before a model is made from a configuration that was read: it may name a foreign class."""
    if isinstance(config.model, ModelConfig) and config.model.mixer not in MIXERS:
        check_import(config.model.mixer, where, trust=trust)


class Best(NamedTuple):
    """The best model of a run so far, and the step that made it: a run that goes on may have
    another one since.
    """

    model: nn.Module
    task: Task
    config: RunConfig
    step: int


def load_best(path: str | Path, device: torch.device, *, trust: bool = False) -> Best:
    """The best model on a device, in evaluation mode; its digests are checked.

    A mixer outside of dlrnn is imported, which runs its code, only with `trust`.
    """
    folder = RunFolder.open(path)
    config, best = folder.config, folder.path / BEST
    check_trusted(config, folder.path / CONFIG, trust=trust)
    tensors, counters = read(best)
    if counters["config"] != config.digest():
        raise ValueError(f"{folder.path / CONFIG} is not the one that {best} was trained with")
    with naming_file(folder.path / CONFIG):
        task = config.make_task()
        model = make_model(config, task)
    load_model(best, tensors, model)
    return Best(model.to(device).eval(), task, config, int(counters["step"]))
