"""Convolution, activation and linear map of the channels.

    out = linear(activation(convolution(u, right, left)))           (then GLU, if asked for)

That composition is the meaning, and what runs wherever our own kernels do not take the tensors: on
other devices, in other precisions, for other activations and widths. Fused, sequences of up to
16384 positions stay in rows [B, H, L] (ops/cuda/convolution.py), the linear map reads and writes
them in passing (ops/cuda/mixing.py), and the activation's value is never stored.

Two ops, so that autograd lets go of the convolution's result before the convolution's backward,
where the memory is needed: one that convolves, into rows if it can, and the ends behind it.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from dlrnn.ops.backends import backend_for
from dlrnn.ops.convolution import (
    DIRECT,
    _backward,
    _convolution,
    check_kernels,
    convolution,
    fitting_kernels,
)
from dlrnn.ops.cuda import mixing as ends
from dlrnn.ops.cuda.convolution import row_stride

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
    between: Callable[[Tensor], Tensor] | None = None,
) -> Float[Tensor, "B L P"]:
    """Convolve u as `convolution` does, then activation, linear map and, if asked for, a GLU.

    `activation` is a function of torch.nn.functional, or "identity"; `between` changes the numbers
    of the convolution's result one by one, in whatever order they lie, before the activation.
    """
    left = right[:, :0] if left is None else left
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
        y, rows_u = _convolve(u, right, left)
        y = y if between is None else between(y)
        out: Tensor = _ends(y, weight, bias, activation, u.shape[1], rows_u.dim() == 3)
    else:
        y = convolution(u, right, left)
        y = y if between is None else between(y)
        out = F.linear(_activated(y, activation), weight, bias)
    return F.glu(out, dim=-1) if glu else out


def _activated(y: Tensor, activation: str) -> Tensor:
    if activation == "identity":
        return y
    value: Tensor = getattr(F, activation)(y)
    return value


def _is_fused() -> bool:
    return backend_for("mix")[0] == "fused"


def _as_sequences(rows: Tensor, length: int) -> Tensor:
    """A view [B, L, H] of rows [B, H, .]."""
    return rows[..., :length].transpose(1, 2)


# ---------------------------------------------------------------------------------- convolution


@torch.library.custom_op("dlrnn::convolve", mutates_args=())
def _convolve(u: Tensor, right: Tensor, left: Tensor) -> tuple[Tensor, Tensor]:
    """Both y and u in rows; or y as it is in `convolution`, and nothing."""
    if (kernels := _row_kernels(u, right, left)) is None:
        return _convolution(u, right, left), u.new_empty(0)
    rows_y, rows_u = kernels.forward_rows(u, right, left)
    return rows_y, rows_u


@_convolve.register_fake
def _(u: Tensor, right: Tensor, left: Tensor) -> tuple[Tensor, Tensor]:
    if _row_kernels(u, right, left) is None:
        return u.new_empty(u.shape), u.new_empty(0)
    shape = u.shape[0], u.shape[2], row_stride(u.shape[1])
    return u.new_empty(shape), u.new_empty(shape)


@torch.library.custom_op("dlrnn::convolve_rows_backward", mutates_args=("rows_dy",))
def _rows_backward(
    rows_dy: Tensor, rows_u: Tensor, right: Tensor, left: Tensor, length: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of u, no longer in rows, and of both kernels; `rows_dy` is used up."""
    kernels = fitting_kernels(_as_sequences(rows_u, length), right, left)
    assert kernels is not None
    du, d_right, d_left = kernels.backward_rows(rows_dy.contiguous(), rows_u, length, right, left)
    return du, d_right, d_left


@_rows_backward.register_fake
def _(
    rows_dy: Tensor, rows_u: Tensor, right: Tensor, left: Tensor, length: int
) -> tuple[Tensor, Tensor, Tensor]:
    du = rows_u.new_empty(rows_u.shape[0], length, rows_u.shape[1])
    return du, right.new_empty(right.shape), left.new_empty(left.shape)


def _row_kernels(u: Tensor, right: Tensor, left: Tensor) -> ModuleType | None:
    """Of a convolution in rows, if the ends behind it can read them."""
    if not _is_fused() or not ends.supports(u):
        return None
    kernels = fitting_kernels(u, right, left)
    return kernels if hasattr(kernels, "forward_rows") else None


def _setup_convolve(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    (u, right, left), (_, rows_u) = inputs, output
    ctx.in_rows, ctx.length = rows_u.dim() == 3, u.shape[1]
    ctx.save_for_backward(rows_u if ctx.in_rows else u, right, left)
    ctx.set_materialize_grads(False)
    if not ctx.in_rows:
        ctx.mark_non_differentiable(rows_u)


def _convolve_gradients(
    ctx: Any, dy: Tensor | None, d_rows: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """`d_rows` comes from second derivatives only: the rows are u's."""
    source, right, left = ctx.saved_tensors
    du: Tensor | None = None if d_rows is None else _as_sequences(d_rows, ctx.length)
    if dy is None:
        return du, None, None
    if not ctx.in_rows:
        more, d_right, d_left = _backward(dy, source, right, left)
    elif torch.is_grad_enabled():  # somebody wants second derivatives: `_backward` has them
        dy, u = _as_sequences(dy, ctx.length), _as_sequences(source, ctx.length)
        more, d_right, d_left = _backward(dy, u, right, left)
    else:
        more, d_right, d_left = _rows_backward(dy, source, right, left, ctx.length)
    return more if du is None else du + more, d_right, d_left


_convolve.register_autograd(_convolve_gradients, setup_context=_setup_convolve)


# ---------------------------------------------------------------------------------- ends


@torch.library.custom_op("dlrnn::mix_ends", mutates_args=())
def _ends(  # noqa: PLR0917
    y: Tensor, weight: Tensor, bias: Tensor, activation: str, length: int, in_rows: bool
) -> Tensor:
    """Activation and linear map: y in rows or [B, L, H] -> [B, L, columns]."""
    if (kernels := _end_kernels(y, in_rows)) is not None:
        out: Tensor = kernels.forward(y, length, weight, bias, activation, in_rows=in_rows)
        return out
    return F.linear(_activated(y, activation), weight, bias)


@_ends.register_fake
def _(  # noqa: PLR0917
    y: Tensor, weight: Tensor, bias: Tensor, activation: str, length: int, in_rows: bool
) -> Tensor:
    return y.new_empty(y.shape[0], length, weight.shape[0])


@torch.library.custom_op("dlrnn::mix_ends_backward", mutates_args=())
def _ends_backward(
    dout: Tensor, y: Tensor, weight: Tensor, activation: str, in_rows: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of y, laid out as y is, of weight and of bias."""
    if (kernels := _end_kernels(y, in_rows)) is not None:
        found: tuple[Tensor, Tensor, Tensor] = kernels.backward(
            dout, y, weight, activation, in_rows=in_rows
        )
        return found
    return _plain_backward(dout, y, weight, activation)


@_ends_backward.register_fake
def _(
    dout: Tensor, y: Tensor, weight: Tensor, activation: str, in_rows: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return y.new_empty(y.shape), weight.new_empty(weight.shape), weight.new_empty(weight.shape[0])


def _end_kernels(y: Tensor, in_rows: bool) -> ModuleType | None:
    """Whoever made rows had the kernels for them."""
    return ends if in_rows or (_is_fused() and ends.supports(y)) else None


def _plain_backward(
    dout: Tensor, y: Tensor, weight: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    dy, flat = dout @ weight, dout.flatten(0, 1)
    if activation == "gelu":
        dy = torch.ops.aten.gelu_backward(dy, y)
    return dy, flat.t() @ _activated(y, activation).flatten(0, 1), flat.sum(0)


def _setup_ends(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    y, weight, _, ctx.activation, ctx.length, ctx.in_rows = inputs
    ctx.save_for_backward(y, weight)


def _ends_gradients(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    y, weight = ctx.saved_tensors
    if not torch.is_grad_enabled():
        found = _ends_backward(dout, y, weight, ctx.activation, ctx.in_rows)
        return (*found, None, None, None)
    y_of = _as_sequences(y, ctx.length) if ctx.in_rows else y  # second derivatives are wanted
    dy, d_weight, d_bias = _plain_backward(dout, y_of, weight, ctx.activation)
    if ctx.in_rows:
        dy = F.pad(dy.transpose(1, 2), (0, y.shape[2] - ctx.length))
    return dy, d_weight, d_bias, None, None, None


_ends.register_autograd(_ends_gradients, setup_context=_setup_ends)
