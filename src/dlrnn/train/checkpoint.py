"""Checkpoints: one safetensors file, model and optimizer; the counters are in its header.

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
from dlrnn.train.sharded import like, whole

HEADER, BEST = "dlrnn_run", "best.safetensors"
_NAME = re.compile(r"step-(\d+)\.safetensors")
_KEPT = 2  # the last good one stays when the newest is damaged


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


def tensors_of(
    model: nn.Module, optimizer: Optimizer | None = None, *, keep: bool = True
) -> dict[str, Tensor]:
    """What a checkpoint holds. Where it is sharded every process has to ask, also one that keeps
    nothing; whole tensors are on the device one at a time.
    """
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    if optimizer is not None:
        for name, state in _optimizer_states(model, optimizer).items():
            tensors |= {f"optimizer.{name}.{key}": value for key, value in state.items()}
    found = {}
    for name, value in tensors.items():
        full = whole(value)
        if keep:
            found[name] = full if full is value else full.cpu()
    return found


def save_checkpoint(
    folder: Path, step: int, tensors: dict[str, Tensor], counters: dict[str, Any]
) -> None:
    """`step-N.safetensors`; older ones but the last are removed."""
    _write(folder / f"step-{step:09d}.safetensors", tensors, {"step": step, **counters})
    remove_old(folder)


def remove_old(folder: Path) -> None:
    """All checkpoints but the last two; a run that was killed may have left a third."""
    for path in checkpoints(folder)[:-_KEPT]:
        with naming(path):
            path.unlink()


def save_best(
    folder: Path, step: int, tensors: dict[str, Tensor], counters: dict[str, Any]
) -> None:
    """`best.safetensors`: the model alone; the digest of its configuration is among `counters`."""
    _write(folder / BEST, tensors, {"step": step, **counters})


def checkpoints(folder: Path) -> list[Path]:
    """The oldest first."""
    return sorted(path for path in folder.glob("step-*.safetensors") if _NAME.fullmatch(path.name))


def step_of(checkpoint: Path) -> int:
    """By its name."""
    return int(checkpoint.stem.removeprefix("step-"))


class Found(NamedTuple):
    """A checkpoint, and what was wrong with newer ones."""

    path: Path
    tensors: dict[str, Tensor]
    counters: dict[str, Any]
    problems: list[str]


def newest(folder: Path) -> Found | None:
    """The newest checkpoint that is whole; None if there is none at all."""
    problems: list[str] = []
    for path in reversed(checkpoints(folder)):
        try:
            tensors, counters = read(path)
        except ValueError as error:
            problems.append(str(error))
            continue
        return Found(path, tensors, counters, problems)
    if problems:
        raise ValueError(f"no checkpoint of {folder} can be read: {problems[0]}")
    return None


def model_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those of the model, without the prefix that tells them from the optimizer's."""
    return {k.removeprefix("model."): v for k, v in tensors.items() if k.startswith("model.")}


def load_model(path: Path, tensors: dict[str, Tensor], model: nn.Module) -> None:
    """The parameters of a checkpoint; those of another model are refused."""
    own, found = model.state_dict(), model_tensors(tensors)
    for name, value in own.items():
        if name not in found:
            raise ValueError(f"{path} is of another model: it has no {name}")
        if found[name].dtype != value.dtype:
            kinds = f"{found[name].dtype}, not {value.dtype}"
            raise ValueError(f"{path} is of another model: its {name} is {kinds}")
        if found[name].shape != value.shape:
            shapes = f"{list(found[name].shape)}, not {list(value.shape)}"
            raise ValueError(f"{path} is of another model: its {name} is {shapes}")
    extra = sorted(found.keys() - own.keys())
    if extra:
        raise ValueError(f"{path} is of another model: it has {extra[0]}, which this one lacks")
    model.load_state_dict(found)


def header(path: Path) -> dict[str, Any]:
    """The counters of the best model, or of a checkpoint; all of the file is checked."""
    return _read(path, tensors=False)[1]


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and counters of the best model, or of a checkpoint."""
    return _read(path, tensors=True)


def _read(path: Path, *, tensors: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
    found = read_sealed(path, tensors=tensors)
    if not found.sealed or HEADER not in found.metadata:
        raise ValueError(f"{path} is no checkpoint of this version: it has no SHA-256 or counters")
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
    still = {
        name: value.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, value in tensors.items()
    }
    write_whole(path, seal(still, {HEADER: json.dumps(counters)}))


def _optimizer_states(model: nn.Module, optimizer: Optimizer) -> dict[str, dict[str, Tensor]]:
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    return {
        names[parameter]: {key: value for key, value in state.items() if isinstance(value, Tensor)}
        for parameter, state in optimizer.state.items()
    }


def load_optimizer(tensors: dict[str, Tensor], model: nn.Module, optimizer: Optimizer) -> None:
    """The state of a checkpoint's optimizer; of a sharded one, this process's shard."""
    on_device = any(
        group.get("capturable") or group.get("fused") for group in optimizer.param_groups
    )
    for name, parameter in model.named_parameters():
        prefix = f"optimizer.{name}."
        found = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
        if not found:  # a parameter that has no gradient has no state
            continue
        shapes = {key: value.shape for key, value in found.items()}
        wanted = {"step": torch.Size(), "exp_avg": parameter.shape, "exp_avg_sq": parameter.shape}
        kinds = {found[key].dtype for key in found if key != "step"}
        if shapes != wanted or kinds != {parameter.dtype} or found["step"].is_complex():
            raise ValueError(f"the checkpoint is of another optimizer: {name} has other moments")
        step = found.pop("step").to(parameter.device if on_device else "cpu")
        state = {key: like(value, parameter) for key, value in found.items()}
        optimizer.state[parameter] = {"step": step, **state}
