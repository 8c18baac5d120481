"""Checkpoints: one safetensors file, model and optimizer; the counters are in its header."""

import json
import re
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from torch.optim import Optimizer

from dlrnn._disk import write_whole
from dlrnn.train.sharded import like, whole

HEADER, BEST = "dlrnn_run", "best.safetensors"
_NAME = re.compile(r"step-(\d+)\.safetensors")
_KEPT = 2  # the last good one stays when the newest is damaged


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
    for path in checkpoints(folder)[:-_KEPT]:
        path.unlink()


def save_best(
    folder: Path, step: int, tensors: dict[str, Tensor], counters: dict[str, Any]
) -> None:
    """`best.safetensors`: the model alone."""
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
    """The newest checkpoint that can be read; None if there is none at all."""
    problems: list[str] = []
    for path in reversed(checkpoints(folder)):
        try:
            tensors, counters = read(path)
            if not counters.keys() >= {"step", "records"}:
                raise ValueError(f"{path} is the model of a run, not a checkpoint")
        except ValueError as error:
            problems.append(str(error))
            continue
        return Found(path, tensors, counters, problems)
    if problems:
        raise ValueError(f"no checkpoint of {folder} can be read: {problems[0]}")
    return None


def load_model(path: Path, tensors: dict[str, Tensor], model: nn.Module) -> None:
    """The parameters of a checkpoint; those of another model are refused."""
    own = model.state_dict()
    found = {k.removeprefix("model."): v for k, v in tensors.items() if k.startswith("model.")}
    for name, value in own.items():
        if name not in found:
            raise ValueError(f"{path} is of another model: it has no {name}")
        if found[name].shape != value.shape:
            shapes = f"{list(found[name].shape)}, not {list(value.shape)}"
            raise ValueError(f"{path} is of another model: its {name} is {shapes}")
    extra = sorted(found.keys() - own.keys())
    if extra:
        raise ValueError(f"{path} is of another model: it has {extra[0]}, which this one lacks")
    model.load_state_dict(found)


def header(path: Path) -> dict[str, Any]:
    """The counters of a checkpoint."""
    return _read(path, tensors=False)[1]


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and counters of a checkpoint."""
    return _read(path, tensors=True)


def _read(path: Path, *, tensors: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        with safe_open(path, framework="pt") as file:
            found = {key: file.get_tensor(key) for key in (file.keys() if tensors else ())}
            counters: dict[str, Any] = json.loads((file.metadata() or {})[HEADER])
            if tensors and counters.get("sum", own := _sum(found)) != own:
                raise ValueError("its numbers are not those that were written")
    except FileNotFoundError:
        there = "it cannot be read" if path.exists() else "there is no such file"
        raise ValueError(f"{path}: {there}") from None
    except (SafetensorError, KeyError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} is damaged or not a checkpoint: {reason}") from error
    return found, counters


def _write(path: Path, tensors: dict[str, Tensor], counters: dict[str, Any]) -> None:
    still = {
        name: value.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, value in tensors.items()
    }
    counters = {**counters, "sum": _sum(still)}
    write_whole(path, save(still, metadata={HEADER: json.dumps(counters)}))


def _sum(tensors: dict[str, Tensor]) -> str:
    """Of all bytes: a file of safetensors has no checksum of its own."""
    found = 0
    for name in sorted(tensors):
        found = zlib.crc32(tensors[name].reshape(-1).view(torch.uint8).numpy().data, found)
    return f"{found:08x}"


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
        step = found.pop("step").to(parameter.device if on_device else "cpu")
        state = {key: like(value, parameter) for key, value in found.items()}
        optimizer.state[parameter] = {"step": step, **state}
