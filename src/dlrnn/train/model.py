"""The model of a run: initialised, or loaded from the best checkpoint."""

import hashlib
import os
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from dlrnn.common.untrusted import check_import, naming_file, read_bytes
from dlrnn.models import LanguageConfig, LanguageModel, ModelConfig, build_model
from dlrnn.models.config import is_built_in
from dlrnn.models.pretrained import LARGEST_FILE
from dlrnn.nn.files import misfit, outline
from dlrnn.tasks import Task
from dlrnn.train.checkpoint import BEST, load_model, model_tensors, read_checkpoint
from dlrnn.train.config import RunConfig
from dlrnn.train.run_directory import CONFIG, RunDirectory


def make_model(config: RunConfig, task: Task) -> nn.Module:
    """The model of a run, initialised from its seed; one that does not fit in memory raises."""
    _check_memory(config, task)
    torch.manual_seed(config.seed)
    model = _build(config, task)
    is_language = isinstance(config.model, LanguageConfig)
    if task.causal and not is_language and not getattr(model, "causal", True):
        raise ValueError(
            f"{task.name} needs a causal model, which reads from left to right:"
            " its mixer must not be bidirectional"
        )
    return model


def _build(config: RunConfig, task: Task) -> nn.Module:
    if isinstance(config.model, LanguageConfig):
        return LanguageModel(config.model)
    return build_model(
        config.model,
        d_input=task.d_input,
        vocabulary=task.vocabulary,
        d_output=task.d_output,
        pooled=task.pooled,
        pair=task.pair,
    )


def _is_built_in(config: RunConfig) -> bool:
    """Whether the model can be made on the meta device, where a user's mixer may fail."""
    return isinstance(config.model, LanguageConfig) or is_built_in(config.model.mixer)


def _check_memory(config: RunConfig, task: Task) -> None:
    """Refuse a model whose parameters, or one activation of it, exceed this machine's memory."""
    numbers = config.batch_size // config.accumulate * task.input_length * config.model.d_model
    if _is_built_in(config):
        tensors = outline(partial(_build, config, task)).values()
        numbers = max(numbers, sum(each.numel() for each in tensors))
    memory = _memory()
    if memory is not None and 4 * numbers > memory:
        needed, there = (f"{value / 2**30:.3g} GiB" for value in (4 * numbers, memory))
        raise ValueError(f"the model needs at least {needed}, and this machine has {there}")


def _memory() -> int | None:
    """Bytes of memory of this machine; None if the system does not report it."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def check_trusted(config: RunConfig, where: Path, *, trust: bool) -> None:
    """Refuse a configuration from a file that names a class outside of dlrnn, unless trusted."""
    model = config.model
    if isinstance(model, ModelConfig) and not is_built_in(model.mixer):
        check_import(config.model.mixer, where, trust=trust)


def check_file(folder: Path, name: str, digest: str) -> None:
    """Refuse a file of a run (a tokenizer) that differs from the one used in training."""
    path = folder / name
    known = Path(name).name == name and path.is_file()
    if not known or hashlib.sha256(read_bytes(path, LARGEST_FILE)).hexdigest() != digest:
        raise ValueError(
            f"{path} is missing or is not the file that {folder / BEST} was trained with"
        )


class Best(NamedTuple):
    """The best model of a run so far, and its step; a run that continues may improve on it."""

    model: nn.Module
    task: Task
    config: RunConfig
    step: int


def load_best(path: str | Path, device: torch.device, *, trust: bool = False) -> Best:
    """Load the best model on a device, in evaluation mode; the digests of its files are checked.

    A mixer outside of dlrnn is imported, which runs its code, only with `trust`.
    """
    folder = RunDirectory.open(path)
    config, best = folder.config, folder.path / BEST
    check_trusted(config, folder.path / CONFIG, trust=trust)
    tensors, counters = read_checkpoint(best)
    if counters["config"] != config.digest():
        raise ValueError(f"{folder.path / CONFIG} is not the one that {best} belongs to")
    for name, digest in counters["files"].items():
        check_file(folder.path, name, digest)
    with naming_file(folder.path / CONFIG):
        task = config.make_task()
        if _is_built_in(config) and (
            wrong := misfit(outline(partial(_build, config, task)), model_tensors(tensors))
        ):
            raise ValueError(f"{best} is of another model: {wrong}")
        model = make_model(config, task)
    load_model(best, tensors, model)
    return Best(model.to(device).eval(), task, config, int(counters["step"]))
