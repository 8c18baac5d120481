"""The model of a run: initialised, saved in checkpoints, loaded.

A checkpoint is one safetensors file with model and optimizer, and counters in its header. The
header also holds a SHA-256 of the whole file, so a damaged checkpoint is never used.
"""

import hashlib
import json
import math
import os
import re
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dlrnn.common.files import naming, write_whole
from dlrnn.common.untrusted import (
    check_import,
    fit_fields,
    naming_file,
    parse_json,
    read_bytes,
    read_sealed,
    seal,
)
from dlrnn.models import LanguageConfig, LanguageModel, build_model
from dlrnn.models.config import foreign_mixers, is_built_in
from dlrnn.models.model import Block
from dlrnn.models.pretrained import LARGEST_FILE
from dlrnn.nn import Mixer
from dlrnn.nn.files import misfit, outline
from dlrnn.tasks import Task, check_batches
from dlrnn.tasks import is_built_in as is_built_in_task
from dlrnn.train.config import RunConfig
from dlrnn.train.distributed import full_tensor, shard_like
from dlrnn.train.run_directory import CONFIG, RunDirectory

Tensors = dict[str, Tensor]
HEADER, BEST = "dlrnn_run", "best.safetensors"
_NAME = re.compile(r"step-(\d+)\.safetensors")
_KEPT = 2  # an older one is used when the newest is damaged


@dataclass(frozen=True)
class _BestSoFar:
    value: float | None
    step: int


_COUNTERS: dict[str, Any] = {
    **{"step": int, "config": str, "data": str | None, "last": dict[str, float]},
    **{"best": _BestSoFar, "records_sha256": str},
    **{"records": int, "snapshots": int},  # bytes of records.jsonl and snapshots.jsonl
    **{"logged": int, "loss_sum": float},  # since the last record, if that was before `step`
    "generator": int,  # the version of the samples, if there is more than one
}
_BEST_COUNTERS = {
    "step": int,
    "config": str,
    "metric": str,
    "value": float,
    "files": dict[str, str],
    "generator": int,
}
"""`files` are SHA-256 of the files that belong to the model: a tokenizer."""


def state_tensors(
    model: nn.Module, optimizer: Optimizer | None = None, *, keep: bool = True
) -> Tensors:
    """The tensors of a checkpoint; {} without `keep`.

    Every process of a sharded run has to call it, also those that do not `keep` the tensors. Full
    tensors are on the device one at a time.
    """
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    if optimizer is not None:
        for name, parameter in model.named_parameters():
            state = optimizer.state.get(parameter, {})
            tensors |= {f"optimizer.{name}.{key}": value for key, value in state.items()}
    found = {}
    for name, value in tensors.items():
        full = full_tensor(value)
        if keep:
            found[name] = full if full is value else full.cpu()
    return found


def save_checkpoint(folder: Path, step: int, tensors: Tensors, counters: dict[str, Any]) -> None:
    """Write `step-N.safetensors`, and remove all but the last two checkpoints."""
    _write(folder / f"step-{step:09d}.safetensors", tensors, {"step": step, **counters})
    remove_old(folder)


def remove_old(folder: Path) -> None:
    """Remove all checkpoints but the last two; a killed run may have left a third."""
    for path in checkpoints(folder)[:-_KEPT]:
        with naming(path):
            path.unlink()


def save_best(folder: Path, step: int, tensors: Tensors, counters: dict[str, Any]) -> None:
    """Write `best.safetensors`: the model, and `counters` with its configuration's digest."""
    _write(folder / BEST, tensors, {"step": step, **counters})


def checkpoints(folder: Path) -> list[Path]:
    """The paths of a run's checkpoints, oldest first."""
    return sorted(path for path in folder.glob("step-*.safetensors") if _NAME.fullmatch(path.name))


def step_of(checkpoint: Path) -> int:
    """The step of a checkpoint, from its file name."""
    return int(checkpoint.stem.removeprefix("step-"))


def generator_of(task: Task) -> dict[str, int]:
    """What headers say of the generator of a task's samples."""
    version = task.generator_version
    return {} if version is None else {"generator": version}


def check_generator(folder: Path, counters: dict[str, Any], task: Task) -> None:
    """Refuse a run whose samples were those of another generator than the task's are now."""
    found, expected = counters.get("generator"), task.generator_version
    if expected is not None and found != expected:
        before = "an unrecorded generator" if found is None else f"generator {found}"
        now = f"{task.name} now has those of generator {expected}"
        cure = "begin a new run, or use the version of dlrnn in its environment.json"
        raise ValueError(f"{folder} was trained on samples of {before}, and {now}: {cure}")


class LoadedCheckpoint(NamedTuple):
    """A checkpoint, and the problems of newer ones that could not be read."""

    path: Path
    tensors: Tensors
    counters: dict[str, Any]
    problems: list[str]


def load_newest(folder: Path) -> LoadedCheckpoint | None:
    """The newest undamaged checkpoint; None if there are no checkpoints."""
    problems: list[str] = []
    for path in reversed(checkpoints(folder)):
        try:
            return LoadedCheckpoint(path, *read_checkpoint(path), problems)
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ValueError(f"no checkpoint of {folder} can be read: {problems[0]}")
    return None


def model_tensors(tensors: Tensors) -> Tensors:
    """The model's tensors of a checkpoint, without the prefix `model.`."""
    return {k.removeprefix("model."): v for k, v in tensors.items() if k.startswith("model.")}


def load_model(path: Path, tensors: Tensors, model: nn.Module) -> None:
    """Load the parameters of a checkpoint; a checkpoint of another model raises."""
    own, found = model.state_dict(), model_tensors(tensors)
    wrong = misfit(own, found)
    for name, value in own.items():
        if not wrong and found[name].dtype != value.dtype:
            wrong = f"{name} is {found[name].dtype}, not {value.dtype}"
    if wrong:
        raise ValueError(f"{path} is of another model: {wrong}")
    model.load_state_dict(found)


def read_header(path: Path) -> dict[str, Any]:
    """The counters of a checkpoint or of the best model; the digest of the file is checked."""
    return read_checkpoint(path, tensors=False)[1]


def read_checkpoint(path: Path, *, tensors: bool = True) -> tuple[Tensors, dict[str, Any]]:
    """Tensors and counters of a checkpoint or of the best model."""
    found = read_sealed(path, tensors=tensors)
    if not found.sealed or HEADER not in found.metadata:
        lacks = "it has no SHA-256 or no counters"
        raise ValueError(f"{path} is not a checkpoint of this version: {lacks}")
    where = f"{path}: its header"
    values = parse_json(found.metadata[HEADER].encode(), where, nan=True)
    if path.name == BEST:
        needed = _BEST_COUNTERS.keys() - {"generator"}
        return found.tensors, fit_fields(values, _BEST_COUNTERS, where, needed=needed)
    needed = _COUNTERS.keys() - {"logged", "loss_sum", "generator"}
    counters = fit_fields(values, _COUNTERS, where, needed=needed)
    counters = {"logged": counters["step"], "loss_sum": 0.0, **counters}
    counters["best"] = asdict(counters["best"])
    fits = 0 <= counters["logged"] <= counters["step"] == step_of(path)
    if not fits or min(counters["records"], counters["snapshots"], counters["best"]["step"]) < 0:
        raise ValueError(f"{where} has counters that do not fit each other or the file's name")
    return found.tensors, counters


def _write(path: Path, tensors: Tensors, counters: dict[str, Any]) -> None:
    copies = {
        name: value.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, value in tensors.items()
    }
    write_whole(path, seal(copies, {HEADER: json.dumps(counters)}))


def load_optimizer(tensors: Tensors, model: nn.Module, optimizer: Optimizer) -> None:
    """Load the optimizer state of a checkpoint; in a sharded run, this process's shard of it."""
    on_device = any(each.get("capturable") or each.get("fused") for each in optimizer.param_groups)
    for name, parameter in model.named_parameters():
        prefix = f"optimizer.{name}."
        found = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
        if not found:  # a parameter that has no gradient has no state
            continue
        shapes = {key: value.shape for key, value in found.items()}
        expected = {"step": torch.Size(), "exp_avg": parameter.shape, "exp_avg_sq": parameter.shape}
        kinds = {found[key].dtype for key in found if key != "step"}
        if shapes != expected or kinds != {parameter.dtype} or found["step"].is_complex():
            raise ValueError(f"the checkpoint is of another optimizer: {name} has other moments")
        step = found.pop("step").to(parameter.device if on_device else "cpu")
        state = {key: shard_like(value, parameter) for key, value in found.items()}
        optimizer.state[parameter] = {"step": step, **state}


# ---------------------------------------------------------------------------------- the model


def make_model(config: RunConfig, task: Task) -> nn.Module:
    """The model of a run, initialised from its seed; one that does not fit in memory raises."""
    numbers = config.batch_size // config.accumulate * task.input_length * config.model.d_model
    if _is_built_in(config):  # a user's mixer may fail on the meta device
        with torch.device("meta"):
            tensors = _build(config, task).state_dict().values()
        numbers = max(numbers, sum(each.numel() for each in tensors))
    memory = _memory()
    if 4 * numbers > memory:
        needed, there = (f"{value / 2**30:.3g} GiB" for value in (4 * numbers, memory))
        raise ValueError(f"the model needs at least {needed}, and this machine has {there}")
    torch.manual_seed(config.seed)
    model = _build(config, task)
    may_look_ahead = isinstance(config.model, LanguageConfig) or not task.causal
    if not may_look_ahead and not getattr(model, "causal", True):
        reads = "which reads from left to right: its mixer must not be bidirectional"
        raise ValueError(f"{task.name} needs a causal model, {reads}")
    return model


def prepared(config: RunConfig) -> tuple[Task, nn.Module]:
    """The task and the model of a run; raises if they do not fit each other or data are missing."""
    task = config.make_task()
    if not is_built_in_task(config.task.name):
        check_batches(task)
    splits = ["train", "validation", *(["test"] if task.kind != "regression" else [])]
    if None in [task.count(split) for split in splits] and not task.drawable:
        task.sample(1)  # its error says how to get the data
    tokens = task.vocabulary or 0
    if isinstance(config.model, LanguageConfig) and tokens > config.model.vocabulary:
        less = f"the model's vocabulary, {config.model.vocabulary}"
        advice = f"--model.vocabulary {tokens}"
        raise ValueError(f"{task.name} has {tokens} tokens, more than {less}: say {advice}")
    model = make_model(config, task)
    if not task.on_device and task.sample(1).lengths is not None:
        for block in model.modules():
            if isinstance(block, Block):
                block.check_padding()
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            kind = type(value).__name__
            raise ValueError(f"checkpoints hold tensors, and {name} of the model is a {kind}")
    return task, model


def grow(model: nn.Module, config: RunConfig, stage: int) -> None:
    """Give the mixers of a run's model the lengths of a stage; the seed decides what is drawn."""
    here = config.at_stage(stage)
    task = here.make_task()
    with torch.device("meta") if _is_built_in(config) else nullcontext():
        mixers = [each for each in _build(here, task).modules() if isinstance(each, Mixer)]
    torch.manual_seed(config.seed)
    own = (each for each in model.modules() if isinstance(each, Mixer))
    for mixer, other in zip(own, mixers, strict=True):
        length: int = getattr(other, "length", task.input_length)
        mixer.grow(length)


def _build(config: RunConfig, task: Task) -> nn.Module:
    if isinstance(config.model, LanguageConfig):
        return LanguageModel(config.model)
    sizes = ("d_input", "vocabulary", "d_output", "pooled", "pair")
    return build_model(config.model, **{name: getattr(task, name) for name in sizes})


def _is_built_in(config: RunConfig) -> bool:
    return isinstance(config.model, LanguageConfig) or is_built_in(config.model.mixer)


def _memory() -> float:
    """Bytes of memory of this machine; infinite if the system does not report it."""
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, ValueError, OSError):
        return math.inf


def needs_trust(config: RunConfig) -> bool:
    """Whether a configuration names a class outside of dlrnn."""
    return not (_is_built_in(config) and is_built_in_task(config.task.name))


def check_trusted(config: RunConfig, where: Path, *, trust: bool) -> None:
    """Refuse a configuration from a file that names a class outside of dlrnn, unless trusted."""
    if not isinstance(config.model, LanguageConfig):
        for mixer in foreign_mixers(config.model.mixer):
            check_import(mixer, where, trust=trust)
    _check_task(config, where, trust=trust)


def _check_task(config: RunConfig, where: Path, *, trust: bool) -> None:
    if not is_built_in_task(config.task.name):
        check_import(config.task.name, where, trust=trust)


def trusted_task(config: RunConfig, where: Path, *, trust: bool) -> Task:
    """The task of a configuration from a file; a mixer outside of dlrnn does not matter."""
    _check_task(config, where, trust=trust)
    with naming_file(where):
        return config.make_task()


class Best(NamedTuple):
    """The best model of a run so far, and its step; a run that continues may improve on it."""

    model: nn.Module
    task: Task
    config: RunConfig
    step: int


def load_best(
    path: str | Path, device: torch.device, *, trust: bool = False, any_samples: bool = False
) -> Best:
    """Load the best model on a device, in evaluation mode; the digests of its files are checked.

    A mixer or a task outside of dlrnn is imported, which runs its code, only with `trust`. A task
    whose generator has changed since the run is refused without `any_samples`.
    """
    folder = RunDirectory.open(path)
    config, best, where = folder.config, folder.path / BEST, folder.path / CONFIG
    check_trusted(config, where, trust=trust)
    tensors, counters = read_checkpoint(best)
    if counters["config"] != config.digest():
        raise ValueError(f"{where} is not the one that {best} belongs to")
    for name, digest in counters["files"].items():
        file = folder.path / name
        known = Path(name).name == name and file.is_file()
        if not known or hashlib.sha256(read_bytes(file, LARGEST_FILE)).hexdigest() != digest:
            sentence = "is missing or is not the file that"
            raise ValueError(f"{file} {sentence} {best} was trained with")
    with naming_file(where):
        task = config.make_task()
    if not any_samples:
        check_generator(folder.path, counters, task)
    with naming_file(where):
        if _is_built_in(config) and (
            wrong := misfit(outline(partial(_build, config, task)), model_tensors(tensors))
        ):
            raise ValueError(f"{best} is of another model: {wrong}")
        model = make_model(config, task)
    load_model(best, tensors, model)
    return Best(model.to(device).eval(), task, config, int(counters["step"]))
