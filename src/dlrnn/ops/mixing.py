"""Convolution, activation and linear map of the channels.

    out = linear(activation(convolution(u, right, left)))           (then GLU, if asked for)

That composition is the meaning, and what runs wherever our own kernels do not take the tensors: on
other devices, in other precisions, for other activations and widths. Fused, sequences of up to
16384 positions stay in rows [B, H, L] (ops/cuda/convolution.py), the linear map reads and writes
them in passing (ops/cuda/output_stage.py), and the activation's value is never stored.

Two ops, so that autograd lets go of the convolution's result before the convolution's backward,
where the memory is needed: `convolve`, into rows if it can, and the ends behind it.
"""

from types import ModuleType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from dlrnn.ops.backends import backend_for
from dlrnn.ops.convolution import (
    DIRECT,
    as_sequences,
    check_kernels,
    convolution,
    convolve,
    empty_left,
    wants_rows,
)
from dlrnn.ops.cuda import output_stage as ends

FUSED_ACTIVATIONS = ("gelu", "identity")
FUSED_CHANNELS = range(16, 257, 16)
FUSED_COLUMNS = range(16, 513, 16)


def mix(
    u: Float[Tensor, "B L H"],
    right: Float[Tensor, "H Kr"],
    left: Float[Tensor, "H Kl"] | None,
    weight: Float[Tensor, "O H"],
    bias: Float[Tensor, " O"] | None,
    *,
    activation: str = "gelu",
    glu: bool = False,
    dropout: float = 0.0,
) -> Float[Tensor, "B L P"]:
    """Convolve u as `convolution` does, then activation, linear map and, if asked for, a GLU.

    `activation` is a function of torch.nn.functional, or "identity"; `dropout` is the probability
    with which it drops numbers of the convolution's result, before the activation.
    """
    left = empty_left(right) if left is None else left
    if (
        u.is_cuda
        and bias is not None
        and all(x.dtype == torch.float32 for x in (u, right, left, weight, bias))
        and activation in FUSED_ACTIVATIONS
        and weight.shape[0] in FUSED_COLUMNS
        and weight.shape[1] in FUSED_CHANNELS
        and not torch.is_autocast_enabled("cuda")
        and (right.shape[-1] > DIRECT or left.shape[-1] > 0)
    ):
        check_kernels(u, right, left)
        y, rows_u = convolve(u, right, left, True, wants_rows())
        y = F.dropout(y, dropout) if dropout else y
        out: Tensor = _ends(y, weight, bias, activation, u.shape[1], rows_u.dim() == 3)
    else:
        y = convolution(u, right, left)
        y = F.dropout(y, dropout) if dropout else y
        out = F.linear(_activated(y, activation), weight, bias)
    return F.glu(out, dim=-1) if glu else out


def _activated(y: Tensor, activation: str) -> Tensor:
    if activation == "identity":
        return y
    value: Tensor = getattr(F, activation)(y)
    return value


# ---------------------------------------------------------------------------------- ends


@torch.library.custom_op("dlrnn::mix_ends", mutates_args=())
def _ends(  # noqa: PLR0917
    y: Tensor, weight: Tensor, bias: Tensor, activation: str, length: int, in_rows: bool
) -> Tensor:
    """Activation and linear map: y in rows or [B, L, H] -> [B, L, columns]."""
    if (kernels := _end_kernels(y)) is not None:
        out: Tensor = kernels.forward(y, length, weight, bias, activation, in_rows=in_rows)
        return out
    y = as_sequences(y, length) if in_rows else y
    return F.linear(_activated(y, activation), weight, bias)


@_ends.register_fake
def _(  # noqa: PLR0917
    y: Tensor,
    weight: Tensor,
    bias: Tensor,
    activation: str,
    length: int | torch.SymInt,
    in_rows: bool,
) -> Tensor:
    return y.new_empty(y.shape[0], length, weight.shape[0])


@torch.library.custom_op("dlrnn::mix_ends_backward", mutates_args=())
def _ends_backward(
    dout: Tensor, y: Tensor, weight: Tensor, activation: str, in_rows: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of y, laid out as y is, of weight and of bias."""
    if (kernels := _end_kernels(y)) is not None:
        found: tuple[Tensor, Tensor, Tensor] = kernels.backward(
            dout, y, weight, activation, in_rows=in_rows
        )
        return found
    return _plain_backward(dout, y, weight, activation, in_rows)


@_ends_backward.register_fake
def _(
    dout: Tensor, y: Tensor, weight: Tensor, activation: str, in_rows: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return y.new_empty(y.shape), weight.new_empty(weight.shape), weight.new_empty(weight.shape[0])


def _end_kernels(y: Tensor) -> ModuleType | None:
    return ends if backend_for("mix")[0] == "fused" and ends.supports(y) else None


def _plain_backward(
    dout: Tensor, y: Tensor, weight: Tensor, activation: str, in_rows: bool
) -> tuple[Tensor, Tensor, Tensor]:
    padding = y.shape[2] - dout.shape[1]
    y = as_sequences(y, dout.shape[1]) if in_rows else y
    dy, flat = dout @ weight, dout.flatten(0, 1)
    if activation == "gelu":
        dy = torch.ops.aten.gelu_backward(dy, y)
    d_weight = flat.t() @ _activated(y, activation).flatten(0, 1)
    if in_rows:
        dy = F.pad(dy.transpose(1, 2), (0, padding)).contiguous()
    return dy, d_weight, flat.sum(0)


def _setup_ends(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    y, weight, _, ctx.activation, _, ctx.in_rows = inputs
    ctx.save_for_backward(y, weight)


def _ends_gradients(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    y, weight = ctx.saved_tensors
    backward = _plain_backward if torch.is_grad_enabled() else _ends_backward  # for second ones
    return (*backward(dout, y, weight, ctx.activation, ctx.in_rows), None, None, None)


_ends.register_autograd(_ends_gradients, setup_context=_setup_ends)
