"""The Vandermonde product `K = Re(W P)`, `P_nk = lambda_n^k`, and its adjoint `M = v P^T`.

P (N x L) never exists. A position is split as `k = a + S b`, so that

    K[a + S b] = Re sum_n (W_n lambda_n^(S b)) lambda_n^a ,

which is one real matrix product `[V_re, -V_im] [A_re; A_im]` of the scaled weights
`V = W lambda^(S b)` (one row for each b) with the fine table `A = lambda^a` (N x S). Both tables
are made in float64, phases reduced before they are rounded, hence right for every length.
The adjoint runs the same product backwards. Each is the other's derivative:

    dW = conj(adjoint(dK)),     d log lambda_n = sum_h W_hn adjoint(k dK)_hn ,

so nothing but the arguments is kept for backward, and second derivatives come for free.
The imaginary part needs no code of its own: `Im(W P) = Re((-i W) P)`.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from dlrnn.ops.backends import is_fused
from dlrnn.ops.checks import require, require_dtype, require_no_transform, require_shape
from dlrnn.ops.cuda import vandermonde as kernels
from dlrnn.ops.pairs import conjugate, pair_product, powers


def vandermonde(
    W: Float[Tensor, "*rows N 2"], log_lambda: Float[Tensor, "N 2"], length: int
) -> Float[Tensor, "*rows {length}"]:
    """`K_k = Re(sum_n W_n lambda_n^k)` for k = 0 .. length-1, in the precision of W."""
    _check(W, log_lambda)
    rows = tuple("." for _ in W.shape[:-2])
    require_shape("W", W, (*rows, log_lambda.shape[0], 2))
    if length < 1:
        raise ValueError(f"length must be at least 1, not {length}")
    flat = W.reshape(math.prod(W.shape[:-2]), *log_lambda.shape)
    kernel: Tensor = _vandermonde(flat, log_lambda.double(), length)
    return kernel.reshape(*W.shape[:-2], length)


def vandermonde_adjoint(
    v: Float[Tensor, "*rows L"], log_lambda: Float[Tensor, "N 2"]
) -> Float[Tensor, "*rows N 2"]:
    """`M_n = sum_k v_k lambda_n^k`, pairs, in the precision of v."""
    _check(v, log_lambda)
    flat = v.reshape(math.prod(v.shape[:-1]), v.shape[-1])
    moments: Tensor = _adjoint(flat, log_lambda.double())
    return moments.reshape(*v.shape[:-1], *log_lambda.shape)


def complex_vandermonde(
    W: Float[Tensor, "*rows N 2"], log_lambda: Float[Tensor, "N 2"], length: int
) -> Float[Tensor, "2 *rows {length}"]:
    """`Re(W P)` and `Im(W P)` in one pass, stacked."""
    minus_i_W = torch.stack((W[..., 1], -W[..., 0]), dim=-1)
    return vandermonde(torch.stack((W, minus_i_W)), log_lambda, length)


def _check(values: Tensor, log_lambda: Tensor) -> None:
    require_no_transform()
    require_dtype("the values of a Vandermonde product", values)
    require_shape("log_lambda", log_lambda, ("N", 2))
    require(
        values.device == log_lambda.device,
        f"values are on {values.device}, log_lambda on {log_lambda.device}: move one of them",
    )


# ---------------------------------------------------------------------------------- forward


@torch.library.custom_op("dlrnn::vandermonde", mutates_args=())
def _vandermonde(W: Tensor, log_lambda: Tensor, length: int) -> Tensor:
    if _is_fused("vandermonde", W, log_lambda):
        return kernels.vandermonde(W, log_lambda, length)
    rows, states, _ = W.shape
    split, blocks = _split(W, length)
    fine = _fine_table(log_lambda, split, W.dtype)  # [N 2, S]
    # conj_physical: inside a compiled graph the lazy conj() bit of a tensor is not honoured here
    W_conj = torch.view_as_complex(W.contiguous()).conj_physical()
    kernel = W.new_empty(rows, blocks, split)
    for b, tiles in _tiles(W, rows, blocks, states):
        coarse = _coarse_table(log_lambda, split, b, W.dtype).conj_physical_()  # [b, N]
        for r in tiles:
            scaled = W_conj[r, None] * coarse  # [r, b, N], holds (V_re, -V_im)
            flat = torch.view_as_real(scaled).view(-1, 2 * states)
            kernel[r, b] = _matmul(flat, fine).view(-1, len(coarse), split)
            del scaled, flat
    return kernel.view(rows, blocks * split)[:, :length].contiguous()


@_vandermonde.register_fake
def _(W: Tensor, log_lambda: Tensor, length: int | torch.SymInt) -> Tensor:
    return W.new_empty(W.shape[0], length)


# ---------------------------------------------------------------------------------- adjoint


@torch.library.custom_op("dlrnn::vandermonde_adjoint", mutates_args=())
def _adjoint(v: Tensor, log_lambda: Tensor) -> Tensor:
    if _is_fused("vandermonde_adjoint", v, log_lambda):
        return kernels.adjoint(v, log_lambda)
    (rows, length), states = v.shape, log_lambda.shape[0]
    split, blocks = _split(v, length)
    fine = _fine_table(log_lambda, split, v.dtype).t()  # [S, N 2]
    if blocks * split > length:
        v = torch.nn.functional.pad(v, (0, blocks * split - length))
    v = v.view(rows, blocks, split)
    moments = torch.zeros(rows, states, dtype=_complex_dtype(v.dtype), device=v.device)
    for b, tiles in _tiles(v, rows, blocks, states):
        coarse = _coarse_table(log_lambda, split, b, v.dtype)
        for r in tiles:
            partial = _matmul(v[r, b].reshape(-1, split), fine)  # sum over a
            partial = torch.view_as_complex(partial.view(-1, len(coarse), states, 2))
            moments[r] += partial.mul_(coarse).sum(1)  # sum over b
            del partial
    return torch.view_as_real(moments)


@_adjoint.register_fake
def _(v: Tensor, log_lambda: Tensor) -> Tensor:
    return v.new_empty(v.shape[0], *log_lambda.shape)


# ---------------------------------------------------------------------------------- derivatives


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _moments(v: Tensor, log_lambda: Tensor, with_slope: bool) -> tuple[Tensor, Tensor | None]:
    """`sum_k v_k lambda^k` and, in the same pass, `sum_k k v_k lambda^k`."""
    if not with_slope:
        return _adjoint(v, log_lambda), None
    position = torch.arange(v.shape[-1], device=v.device, dtype=v.dtype)
    both: Tensor = _adjoint(torch.cat((v, position * v)), log_lambda)
    moments, slope = both.chunk(2)
    return moments, slope


def _log_lambda_gradient(weight: Tensor, slope: Tensor) -> Tensor:
    """`sum_rows (Re, -Im)(weight slope)`: the derivative along log |lambda| and along the phase."""
    return conjugate(pair_product(weight, slope).sum(0, dtype=torch.float64))


@torch.library.custom_op("dlrnn::vandermonde_gradients", mutates_args=())
def _gradients(dK: Tensor, W: Tensor, log_lambda: Tensor) -> tuple[Tensor, Tensor]:
    """Of the product, where they need no derivatives of their own."""
    if _is_fused("vandermonde_adjoint", dK, log_lambda):
        return kernels.gradients(dK, W, log_lambda)
    moments, slope = _moments(dK, log_lambda, True)
    assert slope is not None
    return conjugate(moments), _log_lambda_gradient(W, slope)


@_gradients.register_fake
def _(dK: Tensor, W: Tensor, log_lambda: Tensor) -> tuple[Tensor, Tensor]:
    return W.new_empty(W.shape), log_lambda.new_empty(log_lambda.shape)


def _vandermonde_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
    W, log_lambda = ctx.saved_tensors
    if ctx.needs_input_grad[1] and not torch.is_grad_enabled():
        return *_gradients(grad.contiguous(), W, log_lambda), None
    moments, slope = _moments(grad.contiguous(), log_lambda, ctx.needs_input_grad[1])
    d_log_lambda = None if slope is None else _log_lambda_gradient(W, slope)
    return conjugate(moments), d_log_lambda, None


def _adjoint_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    v, log_lambda = ctx.saved_tensors
    weight = conjugate(grad.contiguous())
    dv = _vandermonde(weight, log_lambda, v.shape[-1]) if ctx.needs_input_grad[0] else None
    d_log_lambda = None
    if ctx.needs_input_grad[1]:
        position = torch.arange(v.shape[-1], device=v.device, dtype=v.dtype)
        d_log_lambda = _log_lambda_gradient(weight, _adjoint(position * v, log_lambda))
    return dv, d_log_lambda


_vandermonde.register_autograd(_vandermonde_backward, setup_context=_setup)
_adjoint.register_autograd(_adjoint_backward, setup_context=_setup)


# ---------------------------------------------------------------------------------- tables


def _is_fused(op: str, values: Tensor, log_lambda: Tensor) -> bool:
    return is_fused(op, supported=kernels.supports(values, log_lambda))


def _complex_dtype(real: torch.dtype) -> torch.dtype:
    return torch.complex128 if real == torch.float64 else torch.complex64


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    if not torch.is_autocast_enabled(a.device.type):
        return a @ b
    with torch.autocast(a.device.type, enabled=False):
        return a @ b


def _split(like: Tensor, length: int) -> tuple[int, int]:
    """S and L/S: the tables hold N S and rows N L/S numbers, which balance at S^2 = rows L."""
    balanced = 2 ** round(math.log2(like.shape[0] * length + 1) / 2)
    split = min(max(balanced, 16), 512, length)
    return split, -(-length // split)


def _workspace(like: Tensor) -> int:
    """Complex numbers that a temporary may hold: 4 MiB of fp32 on a CPU (its cache), else 64."""
    return 2**19 if like.device.type == "cpu" else 2**23


def _tiles(
    like: Tensor, rows: int, blocks: int, states: int
) -> Iterator[tuple[slice, list[slice]]]:
    """Pieces of `blocks`, each with pieces of `rows`: rows x blocks x states fit the workspace.

    Whole rows if possible (they lie together in memory); a coarse table takes at most a quarter.
    """
    workspace = _workspace(like)
    b_step = min(blocks, max(1, workspace // (4 * states)))
    r_step = min(rows, max(1, workspace // (states * b_step))) or 1
    for b in range(0, blocks, b_step):
        yield (
            slice(b, min(b + b_step, blocks)),
            [slice(r, min(r + r_step, rows)) for r in range(0, rows, r_step)],
        )


def _fine_table(log_lambda: Tensor, split: int, dtype: torch.dtype) -> Tensor:
    """`lambda_n^a`, a < split, as a real matrix [2 N, split] whose rows alternate re, im.

    The same split again, `a = c + s d`, saves most of the exponentials; a few states at a time.
    """
    states, inner, device = log_lambda.shape[0], 2 ** (split.bit_length() // 2), log_lambda.device
    position = torch.arange(inner, device=device)
    position = torch.cat((position, torch.arange(0, split, inner, device=device)))
    both = torch.view_as_complex(powers(log_lambda[:, None], position))
    units, steps = both[:, :inner], both[:, inner:]
    table = torch.empty(states, 2, split, dtype=dtype, device=device)
    stride = max(1, _workspace(log_lambda) // (8 * split))
    for start in range(0, states, stride):
        n = slice(start, start + stride)
        product = (steps[n, :, None] * units[n, None, :]).flatten(1)[:, :split]
        table[n, 0], table[n, 1] = product.real, product.imag
    return table.view(2 * states, split)


def _coarse_table(log_lambda: Tensor, split: int, block: slice, dtype: torch.dtype) -> Tensor:
    """`lambda_n^(split b)` for b in block, complex [b, N]."""
    position = split * torch.arange(block.start, block.stop, device=log_lambda.device)
    return torch.view_as_complex(powers(log_lambda, position[:, None]).to(dtype))
