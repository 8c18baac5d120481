"""Which processes train, on which devices, in which precision."""

import atexit
import gc
import inspect
import logging
import os
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from dlrnn.train.sharded import sharded_strategy

if TYPE_CHECKING:
    from lightning_fabric import Fabric


def make_fabric(
    device: str,
    precision: str,
    devices: int | None = None,
    nodes: int | None = None,
    *,
    sharded: bool = False,
) -> "Fabric":
    """Processes and precision; several processes are DDP or, sharded, FSDP."""
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.environments.lightning import LightningEnvironment
    from lightning_fabric.strategies.ddp import DDPStrategy

    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)  # advice to lose precision
    here = devices or int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    all_of_them = int(os.environ.get("WORLD_SIZE") or here)
    where = torch.device(device)
    one = [where.index] if where.type == "cuda" and ":" in device and here == 1 else here
    how: Any = {"fp32": "32-true", "bf16": "bf16-mixed"}
    machines = max(1, all_of_them // here) if nodes is None else nodes
    # Buffers are averaged after each step (step.py): DDP would send them in a forward, which a
    # process without a batch to evaluate never makes.
    strategy: Any = "auto"
    if here * machines > 1:
        no_buffers: Any = {_buffers_in_forward(): False}
        strategy = DDPStrategy(**no_buffers)
        atexit.register(_say_goodbye)
    if sharded:
        if here * machines == 1:
            raise ValueError("--sharded needs several processes: say --devices, or use torchrun")
        strategy = sharded_strategy(here * machines)
    fabric = Fabric(
        accelerator=where.type,
        devices=one,
        num_nodes=machines,
        strategy=strategy,
        precision=how[precision],
    )
    around = getattr(fabric.strategy, "cluster_environment", None)
    alone = isinstance(around, LightningEnvironment) and not os.environ.get("NODE_RANK")
    if machines > 1 and alone:
        each = f"torchrun --nnodes {machines} ..., or srun"  # else the first waits for the others
        raise ValueError(f"several machines need somebody who starts them all: {each}")
    return fabric


def _buffers_in_forward() -> str:
    """The option's name; before torch 2.13 it was another, and kept buffers as they began, too."""
    name = "forward_sync_buffers"
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    return name if name in known else "broadcast_buffers"


def _say_goodbye() -> None:
    """Not at the end of a run: processes that met once cannot meet again, for the next one."""
    if torch.distributed.is_initialized():
        gc.collect()  # what still holds groups of processes: shards, hooks
        torch.distributed.destroy_process_group()  # threads that outlive it end in an abort
