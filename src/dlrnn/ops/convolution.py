"""Long convolution, causal and two-sided, for any length.

    y_i = sum_{j<=i} right_{i-j} u_j  +  sum_{j>i} left_{j-i-1} u_j

The Toeplitz matrix of the two kernels sits inside a circulant one of size
`n >= L + max(len(right) - 1, len(left))`, so nothing wraps around; n is the next size that is fast
to transform. Channels are done a few at a time: temporaries stay in the cache of a CPU, and the
memory stays of the order of u. Spectra are computed again in backward instead of stored.
Sums are formed in fp32 (or fp64), also for bf16 and fp16 inputs.

On a GPU up to 16384 positions of fp32 are convolved in rows [B, H, L] (ops/cuda/convolution.py),
and u's rows are kept for backward. Second derivatives go back through them: to go back through the
same graph after their backward, give that one `retain_graph=True`.
"""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from dlrnn.ops.backends import backend_for, is_fused
from dlrnn.ops.checks import (
    FLOATING,
    require,
    require_dtype,
    require_no_transform,
    require_shape,
)
from dlrnn.ops.cuda import convolution as row_kernels
from dlrnn.ops.cuda import long_convolution

# Up to this many kernel entries a direct sum is faster than the transforms (docs/performance.md).
DIRECT = 4


def convolution(
    u: Float[Tensor, "B L H"],
    right: Float[Tensor, "H Kr"],
    left: Float[Tensor, "H Kl"] | None = None,
) -> Float[Tensor, "B L H"]:
    """Convolve each channel of u with its kernel; `left` reads from right to left, if given."""
    left = empty_left(right) if left is None else left
    check_kernels(u, right, left)
    if right.shape[-1] <= DIRECT and left.shape[-1] == 0:
        return _direct(u, right)
    y: Tensor
    if u.is_cuda and u.dtype == right.dtype and _needs_gradient(u, right, left):
        y, _ = convolve(u, right, left, False, wants_rows())
    else:
        y = _convolution(u, right, left)
    return y


def _needs_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def empty_left(right: Tensor) -> Tensor:
    """The kernel of a convolution that reads from left to right alone; not a part of `right`, to
    whose gradient it would add zeros.
    """
    require_shape("the right kernel", right, ("H", "K"))
    return right.new_empty(right.shape[0], 0)


def check_kernels(u: Tensor, right: Tensor, left: Tensor) -> None:
    """These kernels can be convolved with u."""
    require_no_transform()
    require_shape("u", u, ("B", "L", "H"))
    require_dtype("u", u, FLOATING)
    for name, kernel in (("right", right), ("left", left)):
        require_shape(f"u is [B, L, H], so that the {name} kernel", kernel, (u.shape[2], "K"))
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
    padded = torch.nn.functional.pad(u.to(kernel.dtype), (0, 0, kernel.shape[-1] - 1, 0))
    y = kernel[:, -1] * padded[:, :length]
    for k in range(1, kernel.shape[-1]):
        y = torch.addcmul(y, kernel[:, -1 - k], padded[:, k : k + length])
    return y.to(u.dtype)


@torch.library.custom_op("dlrnn::convolution", mutates_args=())
def _convolution(u: Tensor, right: Tensor, left: Tensor) -> Tensor:
    if kernels := _fused(u, right, left):
        result: Tensor = kernels.forward(u, right, left)
        return result
    size = _size(u, right, left)
    y = torch.empty(u.shape, dtype=u.dtype, device=u.device)
    for h in _channels(u, size):
        u_f = _spectrum(u[..., h], size, right.dtype)
        u_f *= _kernel_spectrum(right[h], left[h], size)
        y[..., h] = _signal(u_f, size)[..., : u.shape[1]].transpose(1, 2)
        del u_f
    return y


@_convolution.register_fake
def _(u: Tensor, right: Tensor, left: Tensor) -> Tensor:
    return torch.empty(u.shape, dtype=u.dtype, device=u.device)


@torch.library.custom_op("dlrnn::convolution_backward", mutates_args=())
def _backward(dy: Tensor, u: Tensor, right: Tensor, left: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if kernels := _fused(u, right, left):
        gradients: tuple[Tensor, Tensor, Tensor] = kernels.backward(dy, u, right, left)
        return gradients
    size, length = _size(u, right, left), u.shape[1]
    du = torch.empty(u.shape, dtype=u.dtype, device=u.device)
    d_right, d_left = torch.zeros_like(right), torch.zeros_like(left)
    for h in _channels(u, size):
        dy_f = _spectrum(dy[..., h], size, right.dtype)
        u_f = _spectrum(u[..., h], size, right.dtype)
        d_kernel = _signal((u_f.conj_physical_().mul_(dy_f)).sum(0), size)  # [h, n]
        del u_f
        d_right[h] = d_kernel[:, : right.shape[1]]
        d_left[h] = d_kernel[:, size - left.shape[1] :].flip(-1)
        dy_f *= _kernel_spectrum(right[h], left[h], size).conj_physical_()
        du[..., h] = _signal(dy_f, size)[..., :length].transpose(1, 2)
        del dy_f
    return du, d_right, d_left


@_backward.register_fake
def _(dy: Tensor, u: Tensor, right: Tensor, left: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    du = torch.empty(u.shape, dtype=u.dtype, device=u.device)
    return du, torch.empty_like(right), torch.empty_like(left)


def _setup(ctx: Any, inputs: tuple[Tensor, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    du, d_right, d_left = _backward(dy, *ctx.saved_tensors)
    return du, d_right, d_left


def _second_gradients(
    ctx: Any, g_du: Tensor, g_right: Tensor, g_left: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`du = T^T dy` and `d_kernel = corr(u, dy)` are bilinear: their derivatives are again such."""
    dy, u, right, left = ctx.saved_tensors
    g_dy = _convolution(g_du, right, left) + _convolution(u, g_right, g_left)
    g_u, _, _ = _backward(dy, u, g_right, g_left)
    _, d_right, d_left = _backward(dy, g_du, right, left)
    return g_dy, g_u, d_right, d_left


_convolution.register_autograd(_gradients, setup_context=_setup)
_backward.register_autograd(_second_gradients, setup_context=_setup)


# ---------------------------------------------------------------------------------- in rows


@torch.library.custom_op("dlrnn::convolve", mutates_args=())
def convolve(
    u: Tensor, right: Tensor, left: Tensor, to_rows: bool, wanted: bool
) -> tuple[Tensor, Tensor]:
    """The convolution, in rows if asked `to_rows`, and u's rows for backward; where there are none,
    or none are `wanted`, y as it is in `convolution`, and nothing.
    """
    if not _has_rows(u, right, left, wanted):
        return _convolution(u, right, left), u.new_empty(0)
    y, rows_u = row_kernels.forward_rows(u, right, left)
    return y if to_rows else row_kernels.from_rows(y, u.shape[1], u.dtype), rows_u


@convolve.register_fake
def _(u: Tensor, right: Tensor, left: Tensor, to_rows: bool, wanted: bool) -> tuple[Tensor, Tensor]:
    if not _has_rows(u, right, left, wanted):
        return u.new_empty(u.shape), u.new_empty(0)
    rows = right.new_empty(u.shape[0], u.shape[2], row_kernels.row_stride(u.shape[1]))
    return torch.empty_like(rows) if to_rows else u.new_empty(u.shape), rows


@torch.library.custom_op("dlrnn::convolve_backward", mutates_args=())
def _sequences_backward(
    dy: Tensor, rows_u: Tensor, right: Tensor, left: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`_backward`, of u's rows."""
    gradients: tuple[Tensor, Tensor, Tensor] = row_kernels.backward_of_rows(dy, rows_u, right, left)
    return gradients


@_sequences_backward.register_fake
def _(dy: Tensor, rows_u: Tensor, right: Tensor, left: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return dy.new_empty(dy.shape), right.new_empty(right.shape), left.new_empty(left.shape)


@torch.library.custom_op("dlrnn::convolve_rows_backward", mutates_args=("rows_dy",))
def _rows_backward(
    rows_dy: Tensor, rows_u: Tensor, right: Tensor, left: Tensor, length: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The same of dy's rows, which are used up; du is no longer in rows."""
    gradients: tuple[Tensor, Tensor, Tensor] = row_kernels.backward_rows(
        rows_dy, rows_u, length, right, left
    )
    return gradients


@_rows_backward.register_fake
def _(
    rows_dy: Tensor, rows_u: Tensor, right: Tensor, left: Tensor, length: int | torch.SymInt
) -> tuple[Tensor, Tensor, Tensor]:
    du = rows_u.new_empty(rows_u.shape[0], length, rows_u.shape[1])
    return du, right.new_empty(right.shape), left.new_empty(left.shape)


def _setup_convolve(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    (u, right, left, ctx.to_rows, _), (_, rows_u) = inputs, output
    ctx.has_rows, ctx.length = rows_u.dim() == 3, u.shape[1]
    ctx.save_for_backward(rows_u if ctx.has_rows else u, right, left)
    ctx.set_materialize_grads(False)
    if not ctx.has_rows:
        ctx.mark_non_differentiable(rows_u)


def _convolve_gradients(
    ctx: Any, dy: Tensor | None, d_rows: Tensor | None
) -> tuple[Tensor | None, ...]:
    """`d_rows` comes from second derivatives only: the rows are u's."""
    source, right, left = ctx.saved_tensors
    du: Tensor | None = None if d_rows is None else as_sequences(d_rows, ctx.length)
    if dy is None:
        return du, None, None, None, None
    if not ctx.has_rows:
        more, d_right, d_left = _backward(dy, source, right, left)
    elif torch.is_grad_enabled():  # somebody wants second derivatives: `_backward` has them
        dy = as_sequences(dy, ctx.length) if ctx.to_rows else dy
        u = as_sequences(source, ctx.length)
        more, d_right, d_left = _backward(dy, u, right, left)
    elif ctx.to_rows:
        more, d_right, d_left = _rows_backward(dy, source, right, left, ctx.length)
    else:
        more, d_right, d_left = _sequences_backward(dy, source, right, left)
    return more if du is None else du + more, d_right, d_left, None, None


convolve.register_autograd(_convolve_gradients, setup_context=_setup_convolve)


def as_sequences(rows: Tensor, length: int | torch.SymInt) -> Tensor:
    """A view [B, L, H] of rows [B, H, .]."""
    return rows[..., :length].transpose(1, 2)


# ---------------------------------------------------------------------------------- which kernels


def wants_rows() -> bool:
    """Asked where a compiled graph is made, not inside an op: it depends on the answer."""
    return backend_for("convolution")[0] == "fused"


def _has_rows(u: Tensor, right: Tensor, left: Tensor, wanted: bool) -> bool:
    return wanted and row_kernels.supports(u, right, left)


def _fused(u: Tensor, right: Tensor, left: Tensor) -> ModuleType | None:
    """Our own kernels, if they are there and take these tensors."""
    if backend_for("convolution")[0] != "fused":
        return None
    every = row_kernels, long_convolution
    kernels = next((kernels for kernels in every if kernels.supports(u, right, left)), None)
    return kernels if is_fused("convolution", supported=kernels is not None) else None


def _size(u: Tensor, right: Tensor, left: Tensor) -> int:
    return fast_length(u.shape[1] + max(right.shape[1] - 1, left.shape[1]))


def _channels(u: Tensor, size: int) -> Iterator[slice]:
    """Blocks of channels whose padded signals fit into the workspace; none for an empty batch."""
    if u.shape[0] == 0:
        return
    channels = max(1, _workspace(u) // (size * u.shape[0]))
    if channels >= 16:
        channels -= channels % 16  # whole cache lines of u
    for start in range(0, u.shape[2], channels):
        yield slice(start, min(start + channels, u.shape[2]))


def _workspace(u: Tensor) -> int:
    """Numbers that a temporary may hold: 2 MiB of fp32 on a CPU (its cache), 1 GiB elsewhere."""
    return 2**19 if u.device.type == "cpu" else 2**28


def _spectrum(u: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """[B, L, h] -> [B, h, n/2 + 1], zero-padded."""
    spectrum: Tensor = torch.fft.rfft(u.transpose(1, 2).to(dtype), n=size)
    return spectrum


def _kernel_spectrum(right: Tensor, left: Tensor, size: int) -> Tensor:
    if left.shape[1]:
        gap = right.new_zeros(right.shape[0], size - right.shape[1] - left.shape[1])
        right = torch.cat((right, gap, left.flip(-1)), dim=1)
    spectrum: Tensor = torch.fft.rfft(right, n=size)
    return spectrum


def _signal(spectrum: Tensor, size: int) -> Tensor:
    signal: Tensor = torch.fft.irfft(spectrum, n=size)
    return signal
