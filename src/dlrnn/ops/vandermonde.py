"""The Vandermonde product `K = Re(W P)`, `P_nk = lambda_n^k`, and its adjoint `M = v P^T`.

P (N x L) is made only where it is small (at the end). A position is split as `k = a + S b`, so that

    K[a + S b] = Re sum_n (W_n lambda_n^(S b)) lambda_n^a ,

which is one real matrix product `[V_re, -V_im] [A_re; A_im]` of the scaled weights
`V = W lambda^(S b)` (one row for each b) with the fine table `A = lambda^a` (N x S). Both tables
are computed in float64, and phases are reduced before they are rounded: they are accurate at every
length. The adjoint runs the same product backwards. Each is the other's derivative:

    dW = conj(adjoint(dK)),     d log lambda_n = sum_h W_hn adjoint(k dK)_hn ,

so only the arguments are kept for backward, and second derivatives need no further code.
`Im(W P)` needs none either: it is `Re((-i W) P)`.

Exception: where P has at most `SMALL` entries, eager mode on a CPU makes it, in float64.
"""

import math
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from dlrnn.ops.checks import (
    REAL,
    require_device,
    require_dtype,
    require_no_transform,
    require_shape,
)
from dlrnn.ops.cuda import vandermonde as kernels
from dlrnn.ops.dispatch import Op, op, runs_eagerly, uses_fused
from dlrnn.ops.pairs import conjugate, has_float64, in_float64, pair_product, powers

COMPLEX = {torch.float32: torch.complex64, torch.float64: torch.complex128}
SMALL = 2**12
"""Entries of P up to which eager mode on a CPU multiplies by P itself."""


def vandermonde(
    W: Float[Tensor, "*rows N 2"],
    log_lambda: Float[Tensor, "N 2"],
    length: int,
    *,
    tf32: bool = False,
) -> Float[Tensor, "*rows {length}"]:
    """`K_k = Re(sum_n W_n lambda_n^k)` for k = 0 .. length-1, in the precision of W.

    With `tf32` the fused kernels, of the gradients too, have the error of tf32 (3e-4): for a kernel
    that meets 16-bit numbers.
    """
    require_no_transform()
    fits = log_lambda.dim() == 2 and W.shape[-2:] == log_lambda.shape and log_lambda.shape[1] == 2
    if not fits or W.dtype not in REAL or W.device != log_lambda.device:
        _explain(W, log_lambda)
        shape = [*W.shape[:-2], *log_lambda.shape]
        require_shape("W", W, tuple(shape))
    if length < 1:
        raise ValueError(f"length must be at least 1, not {length}")
    flat = W if W.dim() == 3 else W.reshape(math.prod(W.shape[:-2]), *log_lambda.shape)
    kernel: Tensor
    if W.is_cpu and runs_eagerly(W) and log_lambda.shape[0] * length <= SMALL:
        kernel = _SmallProduct.apply(flat, log_lambda.double(), length)  # type: ignore[no-untyped-call]
    else:
        kernel = product_op(flat, in_float64(log_lambda), length, tf32)
    return kernel if W.dim() == 3 else kernel.reshape(*W.shape[:-2], length)


def vandermonde_adjoint(
    v: Float[Tensor, "*rows L"], log_lambda: Float[Tensor, "N 2"]
) -> Float[Tensor, "*rows N 2"]:
    """`M_n = sum_k v_k lambda_n^k`, pairs, in the precision of v."""
    require_no_transform()
    _explain(v, log_lambda)
    flat = v.reshape(math.prod(v.shape[:-1]), v.shape[-1])
    moments: Tensor = moments_op(flat, in_float64(log_lambda), False)
    return moments.reshape(*v.shape[:-1], *log_lambda.shape)


def complex_vandermonde(
    W: Float[Tensor, "*rows N 2"], log_lambda: Float[Tensor, "N 2"], length: int
) -> Float[Tensor, "2 *rows {length}"]:
    """`Re(W P)` and `Im(W P)` in one pass, stacked."""
    minus_i_W = torch.stack((W[..., 1], -W[..., 0]), dim=-1)
    return vandermonde(torch.stack((W, minus_i_W)), log_lambda, length)


def _explain(values: Tensor, log_lambda: Tensor) -> None:
    """Raises ValueError if these tensors do not fit together."""
    require_dtype("the values of a Vandermonde product", values)
    require_shape("log_lambda", log_lambda, ("N", 2))
    if not are_together(values, log_lambda):
        require_device("log_lambda", log_lambda, values.device)


def are_together(values: Tensor, log_lambda: Tensor) -> bool:
    """Whether both are on one device, or log lambda on the CPU because the other has no float64."""
    return values.device == log_lambda.device or (
        log_lambda.is_cpu and not has_float64(values.device)
    )


# ---------------------------------------------------------------------------------- forward


def _product(W: Tensor, log_lambda: Tensor, length: int, tf32: bool) -> Tensor:
    """W [R, N, 2], log_lambda [N, 2] in float64 -> K [R, length]."""
    if uses_fused("vandermonde", W, lambda: kernels.supports(W, log_lambda)):
        return kernels.vandermonde(W, log_lambda, length, tf32=tf32)
    rows, states, _ = W.shape
    # conj_physical: inside a compiled graph the lazy conj() bit of a tensor is not honoured here
    W_conj = torch.view_as_complex(W.contiguous()).conj_physical()
    split, blocks = table_split(W, length)
    fine = fine_table(log_lambda, split, W)  # [N 2, S]
    kernel = W.new_empty(rows, blocks, split)
    for b, tiles in _tiles(W, rows, blocks, states):
        coarse = _coarse_table(log_lambda, split, b, W).conj_physical_()  # [b, N]
        for r in tiles:
            scaled = W_conj[r, None] * coarse  # [r, b, N], holds (V_re, -V_im)
            flat = torch.view_as_real(scaled).view(-1, 2 * states)
            kernel[r, b] = matmul(flat, fine).view(-1, len(coarse), split)
            del scaled, flat
    return kernel.view(rows, blocks * split)[:, :length].contiguous()


# ---------------------------------------------------------------------------------- adjoint


def _moments(v: Tensor, log_lambda: Tensor, tf32: bool) -> Tensor:
    """From v [R, L] and log_lambda [N, 2] in float64 -> M [R, N, 2]."""
    if uses_fused("vandermonde_adjoint", v, lambda: kernels.supports(v, log_lambda)):
        return kernels.adjoint(v, log_lambda, tf32=tf32)
    (rows, length), states = v.shape, log_lambda.shape[0]
    split, blocks = table_split(v, length)
    fine = fine_table(log_lambda, split, v).t()  # [S, N 2]
    if blocks * split > length:
        v = torch.nn.functional.pad(v, (0, blocks * split - length))
    v = v.view(rows, blocks, split)
    moments = torch.zeros(rows, states, dtype=COMPLEX[v.dtype], device=v.device)
    for b, tiles in _tiles(v, rows, blocks, states):
        coarse = _coarse_table(log_lambda, split, b, v)
        for r in tiles:
            partial = matmul(v[r, b].reshape(-1, split), fine)  # sum over a
            partial = torch.view_as_complex(partial.view(-1, len(coarse), states, 2))
            moments[r] += partial.mul_(coarse).sum(1)  # sum over b
            del partial
    return torch.view_as_real(moments)


# ---------------------------------------------------------------------------------- derivatives


class Derivatives(NamedTuple):
    """The ops of a product and of its adjoint, each with the other as its derivative."""

    product: Op
    adjoint: Op
    product_backward: Callable[[Any, Tensor], tuple[Tensor | None, ...]]


def with_derivatives(
    names: tuple[str, str, str],
    product: Callable[[Tensor, Tensor, int, bool], Tensor],
    adjoint: Callable[[Tensor, Tensor, bool], Tensor],
    fused: ModuleType,
) -> Derivatives:
    """Make the ops of these functions; `names` are theirs and that of both gradients in one op."""
    product_op, adjoint_op = (
        Op(names[0], product, replays=True),
        Op(names[1], adjoint, replays=True),
    )
    adjoint_name = names[1].removeprefix("dlrnn::")

    @op(names[2], replays=True)
    def gradients(dK: Tensor, W: Tensor, log_lambda: Tensor, tf32: bool) -> tuple[Tensor, Tensor]:
        """Of the product, without derivatives of their own."""
        if uses_fused(adjoint_name, dK, lambda: fused.supports(dK, log_lambda)):
            found: tuple[Tensor, Tensor] = fused.gradients(dK, W, log_lambda, tf32=tf32)
            return found
        return both_gradients(adjoint, dK, W, log_lambda, tf32)

    def both_gradients(
        moments_of: Callable[[Tensor, Tensor, bool], Tensor],
        dK: Tensor,
        W: Tensor,
        log_lambda: Tensor,
        tf32: bool,
    ) -> tuple[Tensor, Tensor]:
        both = torch.cat((dK, _times_position(dK)))
        moments, slope = moments_of(both, log_lambda, tf32).chunk(2)
        return conjugate(moments), _log_lambda_gradient(W, slope)

    @product_op.register_fake
    def _(W: Tensor, log_lambda: Tensor, length: int | torch.SymInt, tf32: bool) -> Tensor:
        return W.new_empty(*W.shape[:-2], length)

    @adjoint_op.register_fake
    def _(v: Tensor, log_lambda: Tensor, tf32: bool) -> Tensor:
        return v.new_empty(v.shape[0], *log_lambda.shape)

    @gradients.register_fake
    def _(dK: Tensor, W: Tensor, log_lambda: Tensor, tf32: bool) -> tuple[Tensor, Tensor]:
        return W.new_empty(W.shape), log_lambda.new_empty(log_lambda.shape)

    def save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.tf32 = inputs[-1]

    def product_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        W, log_lambda = ctx.saved_tensors
        grad, tf32 = grad.contiguous(), ctx.tf32
        if not ctx.needs_input_grad[1]:
            return conjugate(adjoint_op(grad, log_lambda, tf32)), None, None, None
        if torch.is_grad_enabled():
            return *both_gradients(adjoint_op, grad, W, log_lambda, tf32), None, None
        return *gradients(grad, W, log_lambda, tf32), None, None

    def adjoint_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        v, log_lambda = ctx.saved_tensors
        weight = conjugate(grad.contiguous())
        dv = d_log_lambda = None
        if ctx.needs_input_grad[0]:
            dv = product_op(weight, log_lambda, v.shape[-1], ctx.tf32)
        if ctx.needs_input_grad[1]:
            slope = adjoint_op(_times_position(v), log_lambda, ctx.tf32)
            d_log_lambda = _log_lambda_gradient(weight, slope)
        return dv, d_log_lambda, None

    product_op.register_autograd(product_backward, setup_context=save)
    adjoint_op.register_autograd(adjoint_backward, setup_context=save)
    return Derivatives(product_op, adjoint_op, product_backward)


def _times_position(v: Tensor) -> Tensor:
    return v * torch.arange(v.shape[-1], device=v.device, dtype=v.dtype)


def _log_lambda_gradient(weight: Tensor, slope: Tensor) -> Tensor:
    """`sum_rows (Re, -Im)(weight slope)`: the derivative along log |lambda| and along the phase."""
    products = pair_product(weight, slope)
    if has_float64(products.device):
        return conjugate(products.sum(0, dtype=torch.float64))
    return conjugate(in_float64(products).sum(0))


product_op, moments_op, _product_backward = with_derivatives(
    ("dlrnn::vandermonde", "dlrnn::vandermonde_adjoint", "dlrnn::vandermonde_gradients"),
    *(_product, _moments, kernels),
)


class _SmallProduct(torch.autograd.Function):
    """The product with P itself, in eager mode on a CPU: fewer and smaller operations."""

    @staticmethod
    def forward(ctx: Any, W: Tensor, log_lambda: Tensor, length: int) -> Tensor:
        uses_fused("vandermonde", W)  # raises if the fused kernels were requested
        position = torch.arange(length)
        exponent = torch.view_as_complex(log_lambda.contiguous())[:, None] * position
        P = exponent.exp().to(COMPLEX[W.dtype])
        ctx.save_for_backward(W, log_lambda)
        ctx.P, ctx.position, ctx.tf32 = P, position, False
        kernel: Tensor = (torch.view_as_complex(W.contiguous()) @ P).real.clone()
        return kernel

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        W, _ = ctx.saved_tensors
        if torch.is_grad_enabled():  # for second derivatives
            return _product_backward(ctx, grad)[:3]
        both = torch.cat((grad, grad * ctx.position)) if ctx.needs_input_grad[1] else grad
        moments = both.to(ctx.P.dtype) @ ctx.P.mT
        dW = torch.view_as_real(moments[: len(W)].conj_physical())
        if not ctx.needs_input_grad[1]:
            return dW, None, None
        slope = torch.view_as_complex(W.contiguous()) * moments[len(W) :]
        slope = slope.sum(0, dtype=torch.complex128).conj_physical()
        return dW, torch.view_as_real(slope), None


# ---------------------------------------------------------------------------------- tables


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b`, in their own precision also under autocast."""
    if not torch.is_autocast_enabled(a.device.type):
        return a @ b
    with torch.autocast(a.device.type, enabled=False):
        return a @ b


def table_split(like: Tensor, length: int) -> tuple[int, int]:
    """S and L/S: the tables hold N S and rows N L/S numbers, which balance at S^2 = rows L."""
    balanced = 2 ** round(math.log2(like.shape[0] * length + 1) / 2)
    split = min(max(balanced, 16), 512, length)
    return split, -(-length // split)


def workspace(like: Tensor) -> int:
    """Complex numbers of a temporary: 4 MiB in fp32 on a CPU, which fit its cache, else 64 MiB."""
    return 2**19 if like.device.type == "cpu" else 2**23


def _tiles(
    like: Tensor, rows: int, blocks: int, states: int
) -> Iterator[tuple[slice, list[slice]]]:
    """Pieces of `blocks`, each with pieces of `rows`: rows x blocks x states fit the workspace.

    Whole rows if possible (they lie together in memory); a coarse table takes at most a quarter.
    """
    numbers = workspace(like)
    b_step = min(blocks, max(1, numbers // (4 * states)))
    r_step = min(rows, max(1, numbers // (states * b_step))) or 1
    for b in range(0, blocks, b_step):
        yield (
            slice(b, min(b + b_step, blocks)),
            [slice(r, min(r + r_step, rows)) for r in range(0, rows, r_step)],
        )


def fine_table(log_lambda: Tensor, split: int, like: Tensor) -> Tensor:
    """`lambda_n^a`, a < split, as a real matrix [2 N, split] whose rows alternate re, im.

    It has the dtype and the device of `like`.

    The same split again, `a = c + s d`, saves most of the exponentials; a few states at a time.
    """
    states, inner, device = log_lambda.shape[0], 2 ** (split.bit_length() // 2), log_lambda.device
    position = torch.arange(inner, device=device)
    position = torch.cat((position, torch.arange(0, split, inner, device=device)))
    both = torch.view_as_complex(powers(log_lambda[:, None], position))
    units, steps = both[:, :inner], both[:, inner:]
    table = torch.empty(states, 2, split, dtype=like.dtype, device=device)
    stride = max(1, workspace(log_lambda) // (8 * split))
    for start in range(0, states, stride):
        n = slice(start, start + stride)
        product = (steps[n, :, None] * units[n, None, :]).flatten(1)[:, :split]
        table[n, 0], table[n, 1] = product.real, product.imag
    return table.view(2 * states, split).to(like.device)


def _coarse_table(log_lambda: Tensor, split: int, block: slice, like: Tensor) -> Tensor:
    """`lambda_n^(split b)` for b in block, complex [b, N]."""
    position = split * torch.arange(block.start, block.stop, device=log_lambda.device)
    return torch.view_as_complex(powers(log_lambda, position[:, None]).to(like))
