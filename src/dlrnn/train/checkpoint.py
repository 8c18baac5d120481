"""Checkpoints: one safetensors file with model and optimizer, and counters in its header.

The header also holds a SHA-256 of the whole file, so a damaged checkpoint is never used.
"""

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dlrnn.common.files import naming, write_whole
from dlrnn.common.untrusted import fit, parse_json, read_sealed, seal
from dlrnn.train.distributed import full_tensor, shard_like

HEADER, BEST = "dlrnn_run", "best.safetensors"
_NAME = re.compile(r"step-(\d+)\.safetensors")
_KEPT = 2  # an older one is used when the newest is damaged


@dataclass(frozen=True)
class _BestSoFar:
    value: float | None
    step: int


@dataclass(frozen=True)
class _CheckpointHeader:
    step: int
    records: int  # bytes of records.jsonl
    records_sha256: str
    snapshots: int  # bytes of snapshots.jsonl
    best: _BestSoFar
    last: dict[str, float]
    config: str
    data: str | None
    logged: int | None = None  # the last step whose loss is recorded, if it is not `step`
    loss_sum: float | None = None


@dataclass(frozen=True)
class _BestHeader:
    step: int
    config: str
    metric: str
    value: float
    files: dict[str, str]  # SHA-256 of the files that belong to the model: a tokenizer


def state_tensors(
    model: nn.Module, optimizer: Optimizer | None = None, *, keep: bool = True
) -> dict[str, Tensor]:
    """The tensors of a checkpoint; {} without `keep`.

    Every process of a sharded run has to call it, also those that do not `keep` the tensors. Full
    tensors are on the device one at a time.
    """
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    if optimizer is not None:
        for name, state in _optimizer_states(model, optimizer).items():
            tensors |= {f"optimizer.{name}.{key}": value for key, value in state.items()}
    found = {}
    for name, value in tensors.items():
        full = full_tensor(value)
        if keep:
            found[name] = full if full is value else full.cpu()
    return found


def save_checkpoint(
    folder: Path, step: int, tensors: dict[str, Tensor], counters: dict[str, Any]
) -> None:
    """Write `step-N.safetensors`, and remove all but the last two checkpoints."""
    _write(folder / f"step-{step:09d}.safetensors", tensors, {"step": step, **counters})
    remove_old(folder)


def remove_old(folder: Path) -> None:
    """Remove all checkpoints but the last two; a killed run may have left a third."""
    for path in checkpoints(folder)[:-_KEPT]:
        with naming(path):
            path.unlink()


def save_best(
    folder: Path, step: int, tensors: dict[str, Tensor], counters: dict[str, Any]
) -> None:
    """Write `best.safetensors`: the model, and `counters` with its configuration's digest."""
    _write(folder / BEST, tensors, {"step": step, **counters})


def checkpoints(folder: Path) -> list[Path]:
    """The paths of a run's checkpoints, oldest first."""
    return sorted(path for path in folder.glob("step-*.safetensors") if _NAME.fullmatch(path.name))


def step_of(checkpoint: Path) -> int:
    """The step of a checkpoint, from its file name."""
    return int(checkpoint.stem.removeprefix("step-"))


class LoadedCheckpoint(NamedTuple):
    """A checkpoint, and the problems of newer ones that could not be read."""

    path: Path
    tensors: dict[str, Tensor]
    counters: dict[str, Any]
    problems: list[str]


def load_newest(folder: Path) -> LoadedCheckpoint | None:
    """The newest undamaged checkpoint; None if there are no checkpoints."""
    problems: list[str] = []
    for path in reversed(checkpoints(folder)):
        try:
            tensors, counters = read_checkpoint(path)
        except ValueError as error:
            problems.append(str(error))
            continue
        return LoadedCheckpoint(path, tensors, counters, problems)
    if problems:
        raise ValueError(f"no checkpoint of {folder} can be read: {problems[0]}")
    return None


def model_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The model's tensors of a checkpoint, without the prefix `model.`."""
    return {k.removeprefix("model."): v for k, v in tensors.items() if k.startswith("model.")}


def load_model(path: Path, tensors: dict[str, Tensor], model: nn.Module) -> None:
    """Load the parameters of a checkpoint; a checkpoint of another model raises."""
    expected, found = model.state_dict(), model_tensors(tensors)
    for name, value in expected.items():
        if name not in found:
            raise ValueError(f"{path} is of another model: it has no {name}")
        if found[name].dtype != value.dtype:
            kinds = f"{found[name].dtype}, not {value.dtype}"
            raise ValueError(f"{path} is of another model: its {name} is {kinds}")
        if found[name].shape != value.shape:
            shapes = f"{list(found[name].shape)}, not {list(value.shape)}"
            raise ValueError(f"{path} is of another model: its {name} is {shapes}")
    extra = sorted(found.keys() - expected.keys())
    if extra:
        raise ValueError(f"{path} is of another model: it has {extra[0]}, which this one lacks")
    model.load_state_dict(found)


def read_header(path: Path) -> dict[str, Any]:
    """The counters of a checkpoint or of the best model; the digest of the file is checked."""
    return _read(path, tensors=False)[1]


def read_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and counters of a checkpoint or of the best model."""
    return _read(path, tensors=True)


def _read(path: Path, *, tensors: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
    found = read_sealed(path, tensors=tensors)
    if not found.sealed or HEADER not in found.metadata:
        raise ValueError(
            f"{path} is not a checkpoint of this version: it has no SHA-256 or no counters"
        )
    where = f"{path}: its header"
    values = parse_json(found.metadata[HEADER].encode(), where, nan=True)
    if path.name == BEST:
        return found.tensors, asdict(fit(values, _BestHeader, where))
    counters = asdict(fit(values, _CheckpointHeader, where))
    if counters["logged"] is None:
        counters |= {"logged": counters["step"], "loss_sum": 0.0}
    fits = 0 <= counters["logged"] <= counters["step"] == step_of(path)
    if not fits or min(counters["records"], counters["snapshots"], counters["best"]["step"]) < 0:
        raise ValueError(f"{where} has counters that do not fit each other or the file's name")
    return found.tensors, counters


def _write(path: Path, tensors: dict[str, Tensor], counters: dict[str, Any]) -> None:
    copies = {
        name: value.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, value in tensors.items()
    }
    write_whole(path, seal(copies, {HEADER: json.dumps(counters)}))


def _optimizer_states(model: nn.Module, optimizer: Optimizer) -> dict[str, dict[str, Tensor]]:
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    return {
        names[parameter]: {key: value for key, value in state.items() if isinstance(value, Tensor)}
        for parameter, state in optimizer.state.items()
    }


def load_optimizer(tensors: dict[str, Tensor], model: nn.Module, optimizer: Optimizer) -> None:
    """Load the optimizer state of a checkpoint; in a sharded run, this process's shard of it."""
    on_device = any(
        group.get("capturable") or group.get("fused") for group in optimizer.param_groups
    )
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
