"""The processes of a run: devices, precision, shards, determinism, signals.

Several processes copy the parameters (DDP) or share them (FSDP), with the same batches, records and
checkpoints. With FSDP every block gathers its parameters when it needs them; gradients and AdamW's
two moments, three quarters of a run's state, always stay sharded. A device must hold the model
once, when it is made.
"""

import atexit
import gc
import inspect
import logging
import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dlrnn.models.model import Block

if TYPE_CHECKING:  # importing these takes three seconds, which only training should spend
    from lightning_fabric import Fabric
    from lightning_fabric.strategies.model_parallel import ModelParallelStrategy
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


def make_fabric(
    device: str,
    precision: str,
    devices: int | None = None,
    nodes: int | None = None,
    *,
    sharded: bool = False,
) -> "Fabric":
    """Fabric for these devices and precision; several processes use DDP or, if sharded, FSDP."""
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.environments.lightning import LightningEnvironment
    from lightning_fabric.strategies.ddp import DDPStrategy

    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)  # it advises lower precision
    here = devices or int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    world = int(os.environ.get("WORLD_SIZE") or here)
    where = torch.device(device)
    one = [where.index] if where.type == "cuda" and ":" in device and here == 1 else here
    kinds: Any = {"fp32": "32-true", "bf16": "bf16-mixed"}
    machines = max(1, world // here) if nodes is None else nodes
    # Buffers are averaged after each step (step.py). DDP would send them in a forward, which a
    # process without a batch to evaluate never runs.
    strategy: Any = "auto"
    if here * machines > 1:
        no_buffers: Any = {_buffer_option(): False}
        strategy = DDPStrategy(**no_buffers)
        atexit.register(_destroy_process_group)
    if sharded:
        if here * machines == 1:
            raise ValueError("--sharded needs several processes: say --devices, or use torchrun")
        strategy = _sharded_strategy(here * machines)
    how: Any = {"strategy": strategy, "precision": kinds[precision]}
    fabric = Fabric(accelerator=where.type, devices=one, num_nodes=machines, **how)
    environment = getattr(fabric.strategy, "cluster_environment", None)
    no_launcher = isinstance(environment, LightningEnvironment) and not os.environ.get("NODE_RANK")
    if machines > 1 and no_launcher:  # the first process would wait for the others forever
        launcher = f"torchrun --nnodes {machines} ..., or srun"
        raise ValueError(f"multi-node training needs a launcher on every machine: {launcher}")
    return fabric


def local_processes(fabric: "Fabric") -> int:
    """Processes of this run on this machine."""
    return len(getattr(fabric.strategy, "parallel_devices", None) or [fabric.device])


def _buffer_option() -> str:
    """DDP's option that keeps it from sending buffers: it was renamed in torch 2.13."""
    name = "forward_sync_buffers"
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    return name if name in known else "broadcast_buffers"


def _destroy_process_group() -> None:
    """Run at exit, not after a run: processes could not form a group again for the next run."""
    if torch.distributed.is_initialized():
        gc.collect()  # shards and hooks hold process groups
        torch.distributed.destroy_process_group()  # threads that outlive it would abort


# ---------------------------------------------------------------------------------- shards


def _sharded_strategy(processes: int) -> "ModelParallelStrategy":
    from lightning_fabric.strategies.model_parallel import ModelParallelStrategy

    # It warns about outputs that are changed in place; no output of ours is.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view", UserWarning)
    return ModelParallelStrategy(_shard, data_parallel_size=processes, tensor_parallel_size=1)


def is_sharded(fabric: "Fabric") -> bool:
    """Whether each process holds only its shard of the parameters."""
    from lightning_fabric.strategies.model_parallel import ModelParallelStrategy

    return isinstance(fabric.strategy, ModelParallelStrategy)


def _shard(model: nn.Module, mesh: "DeviceMesh") -> nn.Module:
    """Shard each block, and then the parameters outside of the blocks together."""
    from torch.distributed.fsdp import fully_shard

    for module in model.modules():
        if isinstance(module, Block):
            fully_shard(module, mesh=mesh["data_parallel"])
    fully_shard(model, mesh=mesh["data_parallel"])
    return model


def full_tensor(value: Tensor) -> Tensor:
    """All of a tensor; if it is sharded, every process has to call this."""
    return value.full_tensor() if _is_dtensor(value) else value


def local_tensor(value: Tensor) -> Tensor:
    """This process's shard of a tensor, or all of a tensor that is not sharded."""
    return value.to_local() if _is_dtensor(value) else value


def shard_like(value: Tensor, parameter: Tensor) -> Tensor:
    """A full tensor with the device, type and shards of a parameter."""
    value = value.to(parameter.device, parameter.dtype)
    if not _is_dtensor(parameter):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, parameter.device_mesh, parameter.placements)


def _is_dtensor(value: Any) -> TypeGuard["DTensor"]:
    """Whether a tensor is sharded, without importing torch.distributed.tensor."""
    return hasattr(value, "full_tensor")


# ---------------------------------------------------------------------------------- determinism

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
_REFUSED = " does not have a deterministic implementation"
_memory: Any = import_module("torch.utils.deterministic")  # its attribute has no type


@contextmanager
def deterministic(*, enable: bool) -> Iterator[None]:
    """PyTorch's strict deterministic mode, without its slow filling of new memory.

    The strict mode raises for an operation that has no deterministic kernel: where PyTorch only
    warns, attention's gradients are still added in any order.
    """
    enabled = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    if not enable or (enabled and not warns):
        yield
        return
    os.environ.setdefault(_CUBLAS, ":4096:8")  # the strict mode refuses cuBLAS without it
    fills = _memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    _memory.fill_uninitialized_memory = False
    try:
        yield
    except RuntimeError as error:
        if _CUBLAS in str(error):  # PyTorch reads the variable when cuBLAS is first used
            advice = f"set {_CUBLAS}=:4096:8 before its process starts, or train in a new one"
            late = f"this process used cuBLAS before a deterministic run: {advice}"
            raise ValueError(late) from error
        if _REFUSED not in str(error):
            raise
        operation = str(error).partition(_REFUSED)[0]
        raise ValueError(f"{operation}{_REFUSED}: train without --deterministic") from error
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warns)
        _memory.fill_uninitialized_memory = fills


# ---------------------------------------------------------------------------------- signals

REPEAT_SECONDS = 2.0
"""Signals within this time of the first one count as one request."""
PAIR_SECONDS = 0.05
"""`timeout` sends two signals, one to the command and one to its group, within this time."""


@contextmanager
def stop_requests() -> Iterator[list[float]]:
    """A list of the times at which SIGINT or SIGTERM arrived; it is empty until the first one.

    A later Ctrl-C (more than `REPEAT_SECONDS` after the first) raises KeyboardInterrupt at once.
    Outside the main thread no handler can be installed, and the list stays empty.
    """
    requests: list[float] = []
    if threading.current_thread() is not threading.main_thread():
        yield requests
        return

    def handle(number: int, _: Any) -> None:
        requests.append(time.monotonic())
        if number == signal.SIGINT and requests[-1] - requests[0] > REPEAT_SECONDS:
            raise KeyboardInterrupt
        if len(requests) == 1:
            # Python would otherwise run the handler of the second signal of a pair only after a
            # long operation, when it no longer counts as a repetition.
            time.sleep(PAIR_SECONDS)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield requests
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
