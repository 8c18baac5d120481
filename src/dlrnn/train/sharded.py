"""Parameters and optimizer state spread over the processes (FSDP), instead of a copy on each (DDP).

Every block gathers its parameters when it needs them; gradients and AdamW's two averages, three
quarters of a run's state, are never whole. A device must hold the model alone, once, when it is
made. Nothing else of a run changes: batches, records and checkpoints are the same.
"""

import warnings
from typing import TYPE_CHECKING, Any, TypeGuard

from torch import Tensor, nn

from dlrnn.models.model import Block

if TYPE_CHECKING:  # three seconds, which no command should wait for that trains nothing
    from lightning_fabric import Fabric
    from lightning_fabric.strategies.model_parallel import ModelParallelStrategy
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


def sharded_strategy(processes: int) -> "ModelParallelStrategy":
    """Fabric's strategy for so many processes."""
    from lightning_fabric.strategies.model_parallel import ModelParallelStrategy

    # We change no output in place, of which it warns.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view", UserWarning)
    return ModelParallelStrategy(_shard, data_parallel_size=processes, tensor_parallel_size=1)


def is_sharded(fabric: "Fabric") -> bool:
    """Whether a process holds no more than its share of the parameters."""
    from lightning_fabric.strategies.model_parallel import ModelParallelStrategy

    return isinstance(fabric.strategy, ModelParallelStrategy)


def _shard(model: nn.Module, mesh: "DeviceMesh") -> nn.Module:
    """Block by block; what lies around the blocks together."""
    from torch.distributed.fsdp import fully_shard

    for module in model.modules():
        if isinstance(module, Block):
            fully_shard(module, mesh=mesh["data_parallel"])
    fully_shard(model, mesh=mesh["data_parallel"])
    return model


def whole(value: Tensor) -> Tensor:
    """All of a tensor that may be sharded; then every process has to ask."""
    return value.full_tensor() if _is_spread(value) else value


def share(value: Tensor) -> Tensor:
    """What this process has of a tensor that may be sharded."""
    return value.to_local() if _is_spread(value) else value


def like(value: Tensor, parameter: Tensor) -> Tensor:
    """A whole tensor in the form of a parameter: its device, type and shards."""
    value = value.to(parameter.device, parameter.dtype)
    if not _is_spread(parameter):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, parameter.device_mesh, parameter.placements)


def _is_spread(value: Any) -> TypeGuard["DTensor"]:
    """A tensor of torch.distributed, which is there only once it was asked for."""
    return hasattr(value, "full_tensor")
