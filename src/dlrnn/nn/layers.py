"""PyTorch's LayerNorm and linear map with fused kernels on a GPU; their state_dict is PyTorch's.

Also what layers ask about modules: whether they are PyTorch's own, and how they are converted.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from dlrnn import ops
from dlrnn.ops.checks import HALF


class SumNorm(nn.LayerNorm):
    """nn.LayerNorm over the channels, of x or of `x + added`."""

    def __init__(self, d_model: int) -> None:
        super().__init__(d_model)

    def forward(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        """[..., H] to [..., H]."""
        return ops.layer_norm(x, self.weight, self.bias, eps=self.eps, added=added)


class ThinLinear(nn.Linear):
    """nn.Linear, fast where one side has only a few numbers: encoders and decoders."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] to [..., O]."""
        return ops.linear(x, self.weight, self.bias)


_MODULE_HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
_GLOBAL_HOOKS = tuple(f"_global{name}" for name in _MODULE_HOOKS)


def is_unmodified(module: nn.Module | None, *kinds: type[nn.Module]) -> bool:
    """Whether a call of the module computes what PyTorch's class of that name computes.

    It does not with hooks of the module or of all modules (weight norm, pruning), with a `forward`
    that was replaced on the instance (accelerate's offloading), or with tensor subclasses as
    parameters.
    """
    return (
        module is not None
        and type(module) in kinds
        and "forward" not in vars(module)
        and not any(getattr(module, name) for name in _MODULE_HOOKS)
        and not any(getattr(nn.modules.module, name) for name in _GLOBAL_HOOKS)
        and all(type(x) in (Tensor, nn.Parameter, type(None)) for x in module._parameters.values())
    )


def keeping_fp32(
    fn: Callable[[Tensor], Tensor], kept: Sequence[Tensor]
) -> Callable[[Tensor], Tensor]:
    """`fn`, which converts a module's tensors; `kept` and their gradients never become 16-bit."""
    gradients = [t.grad for t in kept if t.is_leaf and t.grad is not None]
    ids = {id(t) for t in (*kept, *gradients)}

    def convert(tensor: Tensor, held: object = gradients) -> Tensor:
        del held  # as long as this function lives, no other tensor has one of the ids
        made = fn(tensor)
        if id(tensor) in ids and made.dtype in HALF:
            return tensor.to(made.device, torch.float32)
        return made

    return convert
