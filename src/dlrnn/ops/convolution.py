"""Long convolution, causal and two-sided, for any length.

    y_i = sum_{j<=i} right_{i-j} u_j  +  sum_{j>i} left_{j-i-1} u_j

The Toeplitz matrix of the two kernels sits inside a circulant one of size
`n >= L + max(len(right) - 1, len(left))`, so nothing wraps around; n is the next size that is fast
to transform. Channels are done a few at a time: temporaries stay in the cache of a CPU, and the
memory stays of the order of u. Spectra are computed again in backward instead of stored.
Sums are formed in fp32 (or fp64), also for bf16 and fp16 inputs.

On a GPU up to 16384 positions are convolved in rows [B, H, L] (ops/cuda/convolution.py),
and u's rows are kept for backward, also for second derivatives: to call backward again after a
double backward, pass `retain_graph=True` to the double backward.
"""

from functools import cache
from types import ModuleType
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from dlrnn.ops.checks import (
    FLOATING,
    REAL,
    require,
    require_dtype,
    require_no_transform,
    require_shape,
)
from dlrnn.ops.cuda import convolution as row_kernels
from dlrnn.ops.cuda import long_convolution
from dlrnn.ops.dispatch import Op, op, prefers_fused, uses_fused

DIRECT = 4
"""Kernel entries up to which a direct sum is faster than transforms (docs/performance.md)."""


def convolution(
    u: Float[Tensor, "B L H"],
    right: Float[Tensor, "H Kr"],
    left: Float[Tensor, "H Kl"] | None = None,
    skip: Float[Tensor, " H"] | None = None,
) -> Float[Tensor, "B L H"]:
    """Convolve each channel of u with its kernel, and add `skip u`.

    `right` reads from left to right, `left` from right to left.
    """
    left = check_kernels(u, right, left)
    if skip is not None and skip.shape != right.shape[:1]:
        require_shape("skip", skip, (right.shape[0],))
    if right.shape[-1] <= DIRECT and left.shape[-1] == 0:
        uses_fused("convolution", u)  # raises if the fused kernels were requested
        return _direct(u, with_skip(right, skip))
    y: Tensor
    if u.is_cuda and needs_gradient(u, right, left):
        y, _, _ = convolve(u, right, left, skip, False, prefers_fused(), u.dtype, False)
    else:
        y = convolution_op(u, right, left, skip)
    return y


def with_skip(right: Tensor, skip: Tensor | None) -> Tensor:
    """The kernel of `conv(right, u) + skip u`: the skip is added to entry 0."""
    if skip is None:
        return right
    return right + F.pad(skip[:, None], (0, right.shape[1] - 1))


def needs_gradient(*tensors: Tensor) -> bool:
    """Whether autograd records what is computed from any of the tensors."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def check_kernels(u: Tensor, right: Tensor, left: Tensor | None) -> Tensor:
    """The left kernel, empty if there is none; ValueError unless u can be convolved with both."""
    require_no_transform()
    if left is None:  # a slice of `right` would add zeros to its gradient
        if not isinstance(right, Tensor) or right.dim() != 2:  # type: ignore[redundant-expr]
            require_shape("the right kernel", right, ("H", "K"))
        left = right.new_empty(right.shape[0], 0)
    if (
        isinstance(u, Tensor)  # type: ignore[redundant-expr]
        and isinstance(right, Tensor)  # type: ignore[redundant-expr]
        and isinstance(left, Tensor)  # type: ignore[redundant-expr]
        and u.dim() == 3
        and right.dim() == left.dim() == 2
        and right.shape[0] == left.shape[0] == u.shape[2]
        and 1 <= right.shape[1] <= u.shape[1]
        and left.shape[1] <= u.shape[1]
        and u.dtype == right.dtype == left.dtype
        and u.dtype in REAL
        and u.device == right.device == left.device
    ):
        return left
    require_shape("u", u, ("B", "L", "H"))
    require_dtype("u", u, FLOATING)
    for name, kernel in (("right", right), ("left", left)):
        require_shape(
            f"the {name} kernel of a u with {u.shape[2]} channels", kernel, (u.shape[2], "K")
        )
        require_dtype(f"the {name} kernel", kernel)
        exact = u.dtype != torch.float64 or kernel.dtype == torch.float64
        require(exact, f"u is float64, so that the {name} kernel must be, too")
        if kernel.shape[-1] > u.shape[1]:
            entries, length = kernel.shape[-1], u.shape[1]
            raise ValueError(
                f"the {name} kernel has {entries} entries, more than {length}, u's length"
            )
    require(right.shape[-1] >= 1, "the right kernel needs at least one entry")
    require(
        u.device == right.device == left.device,
        f"u is on {u.device}, its kernel on {right.device}: move one of them",
    )
    return left


@cache
def fast_length(minimum: int) -> int:
    """The smallest even `2^a 3^b 5^c >= minimum`: a size that every FFT library likes."""
    best: int = 2 ** max(1, (minimum - 1).bit_length())
    five = 1
    while five < best:
        odd = five
        while odd < best:
            size = odd * 2 ** max(1, (-(-minimum // odd) - 1).bit_length())
            best = min(best, size)
            odd *= 3
        five *= 5
    return best


def _direct(u: Tensor, kernel: Tensor) -> Tensor:
    length = u.shape[1]
    padded = F.pad(u.to(kernel.dtype), (0, 0, kernel.shape[-1] - 1, 0))
    y = kernel[:, -1] * padded[:, :length]
    for k in range(1, kernel.shape[-1]):
        y = torch.addcmul(y, kernel[:, -1 - k], padded[:, k : k + length])
    return y.to(u.dtype)


def _convolution(u: Tensor, right: Tensor, left: Tensor, skip: Tensor | None) -> Tensor:
    right = with_skip(right, skip)
    if uses_fused("convolution", u, lambda: _fused(u, right, left) is not None):
        result: Tensor = cast("ModuleType", _fused(u, right, left)).forward(u, right, left)
        return result
    size = fast_length(u.shape[1] + max(right.shape[1] - 1, left.shape[1]))
    y = torch.empty(u.shape, dtype=u.dtype, device=u.device)
    for h in _channel_blocks(u, size):
        u_f = torch.fft.rfft(u[..., h].transpose(1, 2).to(right.dtype), n=size)  # [B, h, n/2 + 1]
        u_f *= _kernel_spectrum(right[h], left[h], size)
        y[..., h] = torch.fft.irfft(u_f, n=size)[..., : u.shape[1]].transpose(1, 2)
    return y


def _backward(
    dy: Tensor, u: Tensor, right: Tensor, left: Tensor, needs_du: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of u (empty if it is not needed), `right` and `left`."""
    if uses_fused("convolution", u, lambda: _fused(u, right, left) is not None):
        kernels = cast("ModuleType", _fused(u, right, left))
        du, d_right, d_left = kernels.backward(dy, u, right, left)
        return du if needs_du else u.new_empty(0), d_right, d_left
    size = fast_length(u.shape[1] + max(right.shape[1] - 1, left.shape[1]))
    blocks = _channel_blocks(u, size)
    if len(blocks) == 1:
        du, d_right, d_left = _gradients_of_channels(dy, u, right, left, size, needs_du)
        return du.contiguous(), d_right.contiguous(), d_left.contiguous()
    du = torch.empty(u.shape if needs_du else 0, dtype=u.dtype, device=u.device)
    d_right, d_left = torch.zeros_like(right), torch.zeros_like(left)
    for h in blocks:
        du_h, d_right[h], d_left[h] = _gradients_of_channels(
            dy[..., h], u[..., h], right[h], left[h], size, needs_du
        )
        if needs_du:
            du[..., h] = du_h
    return du, d_right, d_left


def _gradients_of_channels(  # noqa: PLR0917
    dy: Tensor, u: Tensor, right: Tensor, left: Tensor, size: int, needs_du: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of u (empty if it is not needed), `right` and `left`."""
    dy_f = torch.fft.rfft(dy.transpose(1, 2).to(right.dtype), n=size)
    u_f = torch.fft.rfft(u.transpose(1, 2).to(right.dtype), n=size)
    d_kernel = torch.fft.irfft((u_f.conj_physical_().mul_(dy_f)).sum(0), n=size)  # [h, n]
    del u_f
    d_right, d_left = d_kernel[:, : right.shape[1]], torch.empty_like(left)
    if left.shape[1]:
        d_left = d_kernel[:, size - left.shape[1] :].flip(-1)
    if not needs_du:
        return u.new_empty(0), d_right, d_left
    dy_f *= _kernel_spectrum(right, left, size).conj_physical_()
    du = torch.fft.irfft(dy_f, n=size)[..., : u.shape[1]].transpose(1, 2)
    return du.to(u.dtype), d_right, d_left


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    u, right, left, skip = ctx.saved_tensors
    needs_du = ctx.needs_input_grad[0]
    if needs_du or torch.is_grad_enabled():
        right = with_skip(right, skip)
    du, d_right, d_left = _backward_op(dy, u, right, left, needs_du)
    return du if needs_du else None, d_right, d_left, None if skip is None else d_right[:, 0]


def _second_gradients(
    ctx: Any, g_du: Tensor, g_right: Tensor, g_left: Tensor
) -> tuple[Tensor | None, ...]:
    """`du = T^T dy` and `d_kernel = corr(u, dy)` are bilinear, and so are their derivatives."""
    dy, u, right, left = ctx.saved_tensors
    g_dy = convolution_op(u, g_right, g_left, None)
    g_u, _, _ = _backward_op(dy, u, g_right, g_left, True)
    if g_du.numel() == 0:
        return g_dy, g_u, None, None, None
    g_dy = g_dy + convolution_op(g_du, right, left, None)
    _, d_right, d_left = _backward_op(dy, g_du, right, left, True)
    return g_dy, g_u, d_right, d_left, None


convolution_op = Op("dlrnn::convolution", _convolution, replays=True)
_backward_op = Op("dlrnn::convolution_backward", _backward, replays=True)


@convolution_op.register_fake
def _(u: Tensor, right: Tensor, left: Tensor, skip: Tensor | None) -> Tensor:
    return torch.empty(u.shape, dtype=u.dtype, device=u.device)


@_backward_op.register_fake
def _(
    dy: Tensor, u: Tensor, right: Tensor, left: Tensor, needs_du: bool
) -> tuple[Tensor, Tensor, Tensor]:
    du = torch.empty(u.shape if needs_du else 0, dtype=u.dtype, device=u.device)
    return du, torch.empty_like(right), torch.empty_like(left)


convolution_op.register_autograd(_gradients, saves=4)
_backward_op.register_autograd(_second_gradients, saves=4)


# ---------------------------------------------------------------------------------- in rows


@op("dlrnn::convolve", replays=True)
def convolve(  # noqa: PLR0917
    u: Tensor,
    right: Tensor,
    left: Tensor,
    skip: Tensor | None,
    to_rows: bool,
    wanted: bool,
    dtype: torch.dtype,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns y with `skip u`, and the rows of u for backward; y is in rows, too, if `to_rows`.

    u becomes `dtype`, and y and the rows are stored in it. With `keep` (y in rows and bf16) the
    last result are the spectra of u, also in bf16, which spare backward a third of its transforms.
    Where there are no kernels for rows, or they are not `wanted`, y is [B, L, H] and the others are
    empty.
    """
    if not _has_rows(u, right, left, wanted):
        return convolution_op(u.to(dtype), right, left, skip), u.new_empty(0), u.new_empty(0)
    uses_fused("convolution", u, lambda: True)
    y, rows_u, kept = row_kernels.forward_rows(u, right, left, skip, dtype, keep)
    return y if to_rows else row_kernels.from_rows(y, u.shape[1], dtype), rows_u, kept


@convolve.register_fake
def _(u: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    right, left, _, to_rows, wanted, dtype, keep = others
    y = u.new_empty(u.shape, dtype=dtype)
    if not _has_rows(u, right, left, wanted):
        return y, u.new_empty(0), u.new_empty(0)
    stride = row_kernels.row_stride(u.shape[1])
    rows = u.new_empty(u.shape[0], u.shape[2], stride, dtype=dtype)
    kept = rows.new_empty(row_kernels.spectra_shape(u, right, left) if keep else 0)
    return torch.empty_like(rows) if to_rows else y, rows, kept


@op("dlrnn::convolve_backward", replays=True)
def _sequences_backward(
    dy: Tensor, rows_u: Tensor, right: Tensor, left: Tensor, skip: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients for dy [B, L, H] and u in rows."""
    gradients: tuple[Tensor, Tensor, Tensor] = row_kernels.backward_of_rows(
        dy, rows_u, right, left, skip
    )
    return gradients


@_sequences_backward.register_fake
def _(dy: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    _rows_u, right, left, _skip = others
    return dy.new_empty(dy.shape), right.new_empty(right.shape), left.new_empty(left.shape)


@op("dlrnn::convolve_rows_backward", ("rows_dy",), replays=True)
def _rows_backward(  # noqa: PLR0917
    rows_dy: Tensor,
    rows_u: Tensor,
    kept: Tensor,
    right: Tensor,
    left: Tensor,
    skip: Tensor | None,
    length: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients for dy in rows, which is overwritten; du is [B, L, H] in `dtype`."""
    gradients: tuple[Tensor, Tensor, Tensor] = row_kernels.backward_rows(
        rows_dy, rows_u, kept, length, right, left, skip, dtype
    )
    return gradients


@_rows_backward.register_fake
def _(_: Tensor, rows_u: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    _kept, right, left, _skip, length, dtype = others
    du = rows_u.new_empty(rows_u.shape[0], length, rows_u.shape[1], dtype=dtype)
    return du, right.new_empty(right.shape), left.new_empty(left.shape)


def _setup_convolve(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    (u, right, left, skip, ctx.to_rows, *_), (_, rows_u, kept) = inputs, output
    ctx.has_rows, ctx.length, ctx.dtype = rows_u.dim() == 3, u.shape[1], u.dtype
    ctx.save_for_backward(rows_u if ctx.has_rows else u, right, left, skip, kept)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*((kept,) if ctx.has_rows else (rows_u, kept)))


def _convolve_gradients(
    ctx: Any, dy: Tensor | None, d_rows: Tensor | None, _: None
) -> tuple[Tensor | None, ...]:
    """`d_rows` comes from second derivatives only: the rows are u's."""
    source, right, left, skip, kept = ctx.saved_tensors
    du: Tensor | None = None
    if d_rows is not None:
        du = as_sequences(d_rows, ctx.length).to(ctx.dtype)
    if dy is None:
        return du, None, None, None, None, None, None, None
    if not ctx.has_rows:
        u = source.to(dy.dtype)
        more, d_right, d_left = _backward_op(dy, u, with_skip(right, skip), left, True)
    elif torch.is_grad_enabled():  # for second derivatives, which `_backward_op` has
        dy = as_sequences(dy, ctx.length) if ctx.to_rows else dy
        u = as_sequences(source, ctx.length)
        more, d_right, d_left = _backward_op(dy, u, with_skip(right, skip), left, True)
    elif ctx.to_rows:
        more, d_right, d_left = _rows_backward(
            dy, source, kept, right, left, skip, ctx.length, ctx.dtype
        )
    else:
        more, d_right, d_left = _sequences_backward(dy, source, right, left, skip)
    d_skip = None if skip is None else d_right[:, 0]
    more = more.to(ctx.dtype)
    return more if du is None else du + more, d_right, d_left, d_skip, None, None, None, None


convolve.register_autograd(_convolve_gradients, setup_context=_setup_convolve)


def as_sequences(rows: Tensor, length: int | torch.SymInt) -> Tensor:
    """A view [B, L, H] of rows [B, H, .]."""
    return rows[..., :length].transpose(1, 2)


# ---------------------------------------------------------------------------------- which kernels


def _has_rows(u: Tensor, right: Tensor, left: Tensor, wanted: bool) -> bool:
    return wanted and row_kernels.supports(u, right, left)


def _fused(u: Tensor, right: Tensor, left: Tensor) -> ModuleType | None:
    """The fused kernels that take these tensors."""
    every = row_kernels, long_convolution
    return next((kernels for kernels in every if kernels.supports(u, right, left)), None)


def _channel_blocks(u: Tensor, size: int) -> list[slice]:
    """Blocks of channels whose padded signals fit into the workspace; none for an empty batch.

    The workspace is 2 MiB of fp32 on a CPU, which fit into its cache, and 1 GiB elsewhere.
    """
    if u.shape[0] == 0:
        return []
    channels = max(1, (2**19 if u.is_cpu else 2**28) // (size * u.shape[0]))
    if channels >= 16:
        channels -= channels % 16  # whole cache lines of u
    if channels >= (every := u.shape[2]):
        return [slice(0, every)]
    return [slice(h, min(h + channels, every)) for h in range(0, every, channels)]


def _kernel_spectrum(right: Tensor, left: Tensor, size: int) -> Tensor:
    if left.shape[1]:
        gap = right.new_zeros(right.shape[0], size - right.shape[1] - left.shape[1])
        right = torch.cat((right, gap, left.flip(-1)), dim=1)
    spectrum: Tensor = torch.fft.rfft(right, n=size)
    return spectrum
