"""Convolution, activation and linear map of the channels.

    out = linear(activation(convolution(u, right, left)))           (then GLU, if asked for)

This composition defines the op, and it runs wherever the fused kernels do not take the tensors: on
other devices, in other precisions, for other activations and widths. The fused kernels keep
sequences of up to 16384 positions in channel-major layout [B, H, L] (ops/cuda/convolution.py); the
linear map converts the layout (ops/cuda/output_stage.py), and the activation's value is never
stored. Under autocast they store u, y and out, and their gradients, in autocast's dtype; the
convolution's kernels, its sums, and the gradients of all parameters stay fp32.

There are two ops, so that autograd frees the convolution's result before the convolution's
backward, which needs the memory: `convolve`, in channel-major layout if it can, and its epilogue.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from dlrnn.ops.convolution import (
    DIRECT,
    as_sequences,
    check_kernels,
    convolution,
    convolve,
    needs_gradient,
)
from dlrnn.ops.cuda import output_stage
from dlrnn.ops.dispatch import op, prefers_fused, runs_eagerly, uses_fused

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
    skip: Float[Tensor, " H"] | None = None,
    activation: str = "gelu",
    glu: bool = False,
    between: Callable[[Tensor], Tensor] | None = None,
) -> Float[Tensor, "B L P"]:
    """Convolve u as `convolution` does, then activation, linear map and, if asked for, a GLU.

    `activation` is a function of torch.nn.functional, or "identity". `between` is applied to the
    convolution's result before the activation; it must work on each number by itself (dropout).
    """
    dtype = stored_dtype(u)
    kernels = (right,) if left is None else (right, left)
    fits = (
        u.is_cuda
        and bias is not None
        and u.dtype in (torch.float32, dtype)
        and all(x.dtype == torch.float32 for x in (*kernels, weight, bias))
        and activation in FUSED_ACTIVATIONS
        and weight.shape[0] in FUSED_COLUMNS
        and weight.shape[1] in FUSED_CHANNELS
        and (right.shape[-1] > DIRECT or (left is not None and left.shape[-1] > 0))
    )
    if not fits:
        uses_fused("mix", u)  # raises if the fused kernels were requested
    if fits and bias is not None:
        left = check_kernels(u, right, left)
        # A compiled graph with spectra, whose size depends on the plan, would serve one length.
        keep = dtype == torch.bfloat16 and runs_eagerly(u) and needs_gradient(u, right, left)
        y, rows_u, _ = convolve(u, right, left, skip, True, prefers_fused(), dtype, keep)
        y = y if between is None else between(y)
        out: Tensor = epilogue_op(y, weight, bias, activation, u.shape[1], rows_u.dim() == 3)
    else:
        y = convolution(u, right, left, skip)
        y = y if between is None else between(y)
        out = F.linear(activated(y, activation), weight, bias)
    return F.glu(out, dim=-1) if glu else out


def stored_dtype(u: Tensor) -> torch.dtype:
    """The dtype in which fused kernels store activations: autocast's, or fp32 without it."""
    autocast = u.is_cuda and torch.is_autocast_enabled("cuda")
    return torch.get_autocast_dtype("cuda") if autocast else torch.float32


def activated(y: Tensor, activation: str) -> Tensor:
    """The activation of y, by its name."""
    if activation == "identity":
        return y
    value: Tensor = getattr(F, activation)(y)
    return value


# ---------------------------------------------------------------------------------- epilogue


@op("dlrnn::mix_ends", replays=True)
def epilogue_op(  # noqa: PLR0917
    y: Tensor, weight: Tensor, bias: Tensor, activation: str, length: int, in_rows: bool
) -> Tensor:
    """Activation and linear map: y in rows or [B, L, H] -> [B, L, columns], in the dtype of y."""
    if (kernels := epilogue_kernels(y)) is not None:
        out: Tensor = kernels.forward(y, length, weight, bias, activation, in_rows=in_rows)
        return out
    y = as_sequences(y, length) if in_rows else y
    return F.linear(activated(y, activation), weight.to(y.dtype), bias.to(y.dtype))


@epilogue_op.register_fake
def _(  # noqa: PLR0917
    y: Tensor,
    weight: Tensor,
    bias: Tensor,
    activation: str,
    length: int | torch.SymInt,
    in_rows: bool,
) -> Tensor:
    return y.new_empty(y.shape[0], length, weight.shape[0])


@op("dlrnn::mix_epilogue_backward", replays=True)
def epilogue_backward(
    dout: Tensor, y: Tensor, weight: Tensor, activation: str, in_rows: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of y, laid out as y is and in its dtype, of weight and of bias."""
    if (kernels := epilogue_kernels(y)) is not None:
        found: tuple[Tensor, Tensor, Tensor] = kernels.backward(
            dout, y, weight, activation, in_rows=in_rows
        )
        return found
    return plain_backward(dout, y, weight, activation, in_rows)


@epilogue_backward.register_fake
def _(
    dout: Tensor, y: Tensor, weight: Tensor, activation: str, in_rows: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return y.new_empty(y.shape), weight.new_empty(weight.shape), weight.new_empty(weight.shape[0])


def epilogue_kernels(y: Tensor) -> ModuleType | None:
    """The fused kernels of the epilogue, if they take y."""
    return output_stage if uses_fused("mix", y, lambda: output_stage.supports(y)) else None


def plain_backward(
    dout: Tensor, y: Tensor, weight: Tensor, activation: str, in_rows: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of y, weight and bias in PyTorch, which can be differentiated again."""
    padding = y.shape[2] - dout.shape[1]
    y = as_sequences(y, dout.shape[1]) if in_rows else y
    dy, flat = dout @ weight.to(dout.dtype), dout.flatten(0, 1)
    if activation == "gelu":
        dy = torch.ops.aten.gelu_backward(dy, y)
    d_weight = (flat.t() @ activated(y, activation).flatten(0, 1)).to(weight.dtype)
    if in_rows:
        dy = F.pad(dy.transpose(1, 2), (0, padding)).contiguous()
    return dy, d_weight, flat.sum(0, dtype=weight.dtype)


def _setup_epilogue(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    y, weight, _, ctx.activation, _, ctx.in_rows = inputs
    ctx.save_for_backward(y, weight)


def _epilogue_gradients(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    y, weight = ctx.saved_tensors
    backward = (
        plain_backward if torch.is_grad_enabled() else epilogue_backward
    )  # for second derivatives
    return (*backward(dout, y, weight, ctx.activation, ctx.in_rows), None, None, None)


epilogue_op.register_autograd(_epilogue_gradients, setup_context=_setup_epilogue)
