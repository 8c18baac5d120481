"""Optimizer groups by the role of a parameter, and a check of optimizers made without them."""

import warnings
from collections.abc import Iterator
from typing import Any, cast

from torch import nn
from torch.nn.utils.parametrize import is_parametrized
from torch.optim import Optimizer

from dlrnn.ops.checks import require

KERNEL_LR = 1e-3
"""The largest rate that we recommend for the kernel parameters of a convolution, under Adam."""

_UNDECAYED = nn.LayerNorm, nn.RMSNorm, nn.Embedding, nn.EmbeddingBag
"""Modules whose parameters have no weight decay, of any shape; vectors have none anywhere."""


def param_groups(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float = 0.0,
    kernel_lr: float | None = None,
    decay_all: bool = False,
) -> list[dict[str, Any]]:
    """Groups for any optimizer: kernel parameters without weight decay, at their own rate.

    A module names its kernel parameters in `kernel_parameters` (DLR: lambda and W). Of the others,
    norms, biases, vectors and embeddings get no weight decay either, nor do parameters with the tag
    `_no_weight_decay`; with `decay_all` all but kernel parameters decay, as in the paper. Frozen
    parameters are left out; shared ones appear once.

        torch.optim.AdamW(param_groups(model, lr=1e-3, weight_decay=0.05, kernel_lr=1e-4))
    """
    kind = type(model).__name__
    require(isinstance(model, nn.Module), f"param_groups takes a model, not a {kind}")
    kernel = {id(p): p for _, p in _kernel_parameters(model) if p.requires_grad}
    other = [p for p in model.parameters() if p.requires_grad and id(p) not in kernel]
    kept = set() if decay_all or not weight_decay else _without_decay(model)
    groups = [
        {
            "params": [p for p in other if id(p) not in kept],
            "lr": lr,
            "weight_decay": weight_decay,
            "role": "other",
        },
        {
            "params": [p for p in other if id(p) in kept],
            "lr": lr,
            "weight_decay": 0.0,
            "role": "no decay",
        },
        {
            "params": list(kernel.values()),
            "lr": lr if kernel_lr is None else kernel_lr,
            "weight_decay": 0.0,
            "role": "kernel",
        },
    ]
    return [group for group in groups if group["params"]]


def check_optimizer(model: nn.Module, optimizer: Optimizer) -> None:
    """Warn if kernel parameters would decay, or learn at a rate above the recommended one.

    `KERNEL_LR` is that rate for DLR and the other convolutions, under optimizers of the Adam kind.
    """
    kind = type(optimizer).__name__
    takes = "check_optimizer takes a model and an optimizer"
    require(isinstance(model, nn.Module), f"{takes}, not a {type(model).__name__}")
    require(isinstance(optimizer, Optimizer), f"{takes}, not a {kind}")
    limits = {id(p): getattr(module, "kernel_lr", None) for module, p in _kernel_parameters(model)}
    problems = {}
    for group in optimizer.param_groups:
        found = [limits[id(p)] for p in group["params"] if id(p) in limits]
        if found and group.get("weight_decay"):
            problems["decay"] = f"have a weight decay of {group['weight_decay']:g}"
        rate = float(group["lr"])
        if "betas" in group and any(limit is not None and rate > limit for limit in found):
            problems["rate"] = f"learn at the rate {rate:g}, above {KERNEL_LR:g}"
    if problems:
        cure = f"{kind}(param_groups(model, lr=..., kernel_lr={KERNEL_LR:g}), ...)"
        sentence = " and ".join(problems.values())
        warnings.warn(
            f"kernel parameters of the model {sentence}, which can keep layers from learning: make"
            f" the optimizer as {cure}, with param_groups from dlrnn",
            stacklevel=2,
        )


def _kernel_parameters(model: nn.Module) -> Iterator[tuple[Any, nn.Parameter]]:
    """Every kernel parameter, with the module that names it."""
    for module in model.modules():
        for name in getattr(module, "kernel_parameters", ()):
            for parameter in _behind(module, name):
                yield module, parameter


def _without_decay(model: nn.Module) -> set[int]:
    """Ids of norms, biases, vectors, embeddings and parameters tagged `_no_weight_decay`."""
    return {
        id(p)
        for module in model.modules()
        for name, p in module.named_parameters(recurse=False)
        if p.dim() < 2
        or name.endswith("bias")
        or isinstance(module, _UNDECAYED)
        or getattr(p, "_no_weight_decay", False)
    }


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
