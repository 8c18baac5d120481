"""Optimizer groups by the role of a parameter."""

from collections.abc import Iterator
from typing import Any, cast

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from dlrnn.ops.checks import require


def param_groups(
    model: nn.Module, *, lr: float, weight_decay: float = 0.0, kernel_lr: float | None = None
) -> list[dict[str, Any]]:
    """Groups for any optimizer: kernel parameters without weight decay, at their own rate.

    A module names its kernel parameters in `kernel_parameters` (DLR: lambda and W). All others get
    the weight decay, as in the paper. Frozen parameters are left out; shared ones appear once.

        torch.optim.AdamW(param_groups(model, lr=1e-3, weight_decay=0.05, kernel_lr=1e-4))
    """
    kind = type(model).__name__
    require(isinstance(model, nn.Module), f"param_groups takes a model, not a {kind}")
    kernel = {
        id(parameter): parameter
        for module in model.modules()
        for name in getattr(module, "kernel_parameters", ())
        for parameter in _behind(module, name)
        if parameter.requires_grad
    }
    other = [p for p in model.parameters() if p.requires_grad and id(p) not in kernel]
    groups = [
        {"params": other, "lr": lr, "weight_decay": weight_decay, "role": "other"},
        {
            "params": list(kernel.values()),
            "lr": lr if kernel_lr is None else kernel_lr,
            "weight_decay": 0.0,
            "role": "kernel",
        },
    ]
    return [group for group in groups if group["params"]]


def _behind(module: nn.Module, name: str) -> Iterator[nn.Parameter]:
    """The parameter of that name, or those it is computed from (`parametrize`, `prune`)."""
    if is_parametrized(module, name):
        yield from cast("nn.ModuleDict", module.parametrizations)[name].parameters()
        return
    value = getattr(module, name)
    if isinstance(value, nn.Parameter):
        yield value
    elif value is not None:
        parts = (module._parameters.get(f"{name}_{part}") for part in ("orig", "g", "v"))
        yield from (part for part in parts if part is not None)
