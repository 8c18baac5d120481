"""The tape: values written at one angle of the circle and read at another, `sum K(r_k - a_j) v_j`.

The kernel has N harmonics, `K(t) = Re sum_n c_n e^(i n t)`, so that writing and reading are

    S_n = sum_{j <= k} v_j e^(i n a_j) ,        y_k = Re sum_n c_n e^(i n r_k) conj(S_n) .

In a chunk of C positions, with the features `A = e^(i n a)` and `R = e^(i n r)` and the real
product `<x, y> = sum_n Re(conj(x_n) y_n)`:

    y = <R, conj(c) S>  +  tril <R, conj(c) A> v ,        S' = S + v^T A .

Features are made for one chunk at a time and again in the backward pass, which goes from the last
chunk to the first and takes the values of each out of the state again. The memory is that of
inputs, outputs, features of one chunk and one state.

Angles are float64, in turns. Whole turns are taken out before and after the product with n, and
`e^(i n a)` is a product of two tables, as `n = m + S l`.

A matrix product multiplies what a position must not see by 0, and 0 times NaN is NaN. So the
products take 0 for numbers that are not finite, and `tape` puts NaN where they reach.
"""

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from dlrnn.ops.checks import require, require_dtype, require_no_transform, require_shape
from dlrnn.ops.dispatch import op
from dlrnn.ops.vandermonde import matmul

CHUNK = 32
"""Positions of a chunk: half of the products inside a chunk are wasted, a state costs D / C."""


def tape(
    v: Float[Tensor, "B L heads D"],
    write: Float[Tensor, "#B L #heads"],
    read: Float[Tensor, "B L heads"],
    c: Float[Tensor, "heads G N 2"],
    state: Float[Tensor, "B heads D N 2"] | None = None,
) -> tuple[Float[Tensor, "B L heads D"], Float[Tensor, "B heads D N 2"]]:
    """`y_k = sum_{j <= k} K(read_k - write_j) v_j` and the state after the last position.

    The angles are float64, in turns: 1 is the whole circle. The D channels of a head form G groups,
    each with a kernel of its own, `K(t) = Re sum_n c_n e^(2 pi i n t)`. `state` is that of the
    positions before, `S_n = sum_j v_j e^(2 pi i n write_j)`, pairs. Where all sequences and heads
    write at the same angles, `write` [1, L, 1] without gradients has its features made once.
    """
    _check(v, write, read, c, state)
    batch, _, heads, channels = v.shape
    if state is None:
        state = v.new_zeros(batch, heads, channels, *c.shape[2:])
    moves = torch.is_grad_enabled() and write.requires_grad
    if moves or write.shape[0] * write.shape[2] > 1:  # one clock of all is kept as one
        write = write.expand(batch, -1, heads)
    y_nan, after_nan = _reach_of_nan(v.detach(), write.detach(), read.detach())
    v, write, read = v.permute(2, 0, 1, 3), write.permute(2, 0, 1), read.permute(2, 0, 1)
    y, after = _tape(v, write, read, c, state.transpose(0, 1), moves)
    return y.permute(1, 2, 0, 3) + y_nan, after.transpose(0, 1) + after_nan


def _reach_of_nan(
    v: Float[Tensor, "B L heads D"],
    write: Float[Tensor, "#B L #heads"],
    read: Float[Tensor, "B L heads"],
) -> tuple[Float[Tensor, "B L heads 1"], Float[Tensor, "B heads 1 1 1"]]:
    """NaN for the outputs and states that numbers reach which are not finite, 0 for the others.

    What is written reaches its own and all later positions, what is read only its own.
    """
    length = v.shape[1]
    k = torch.arange(length, device=v.device)[:, None]
    written = (torch.linalg.vector_norm(v, math.inf, dim=-1) + write).isfinite()
    first = torch.where(written, length, k).amin(1, keepdim=True)  # [B, 1, heads]
    y_nan = (k >= first) | ~read.isfinite()
    zero = v.new_zeros(())
    after_nan = zero.masked_fill(first[:, 0, :, None, None, None] < length, math.nan)
    return zero.masked_fill(y_nan[..., None], math.nan), after_nan


def _finite(x: Tensor) -> Tensor:
    """With 0 for numbers that are not finite."""
    return x.nan_to_num(0.0, 0.0, 0.0)


def _check(v: Tensor, write: Tensor, read: Tensor, c: Tensor, state: Tensor | None) -> None:
    require_no_transform()
    require_shape("v", v, ("B", "L", "heads", "D"))
    batch, _, heads, channels = v.shape
    require_shape("c", c, (heads, "G", "N", 2))
    length = v.shape[1]
    shared = [1 if write.shape[k] == 1 else size for k, size in ((0, batch), (2, heads))]
    require_shape("write", write, (shared[0], length, shared[1]))
    require_shape("read", read, (batch, length, heads))
    for name, angle in (("write", write), ("read", read)):
        require_dtype(name, angle, (torch.float64,))
    require_dtype("v", v)
    require_dtype("c", c, (v.dtype,))
    if channels % c.shape[1]:
        groups = f"{channels} channels for {c.shape[1]} kernels"
        raise ValueError(f"the channels of a head must be a multiple of its kernels; got {groups}")
    if state is not None:
        require_shape("state", state, (batch, heads, channels, *c.shape[2:]))
        require_dtype("state", state, (v.dtype,))
    others = (write, read, c) if state is None else (write, read, c, state)
    same = all(t.device == v.device for t in others)
    require(same, "v, write, read, c and state must be on one device: move them with .to()")


# ---------------------------------------------------------------------------------- pieces


def features(turns: Float[Tensor, "*B C"], harmonics: int, dtype: torch.dtype) -> Tensor:
    """`e^(2 pi i n turns)` for n = 0 .. harmonics-1, complex [*B, C, N], of this real dtype."""
    fine = 2 ** math.ceil(math.log2(harmonics) / 2)
    coarse = -(-harmonics // fine)
    n = torch.arange(max(fine, coarse), device=turns.device, dtype=torch.float64)
    turns = _reduced(turns).contiguous()  # products would copy features of another layout
    tables = _units(turns, n[:coarse] * fine, dtype), _units(turns, n[:fine], dtype)
    return (tables[0][..., :, None] * tables[1][..., None, :]).flatten(-2)[..., :harmonics]


def _units(turns: Tensor, n: Tensor, dtype: torch.dtype) -> Tensor:
    phase = (2 * math.pi * _reduced(turns[..., None] * n)).to(dtype)
    return torch.polar(torch.ones_like(phase), phase)


def _reduced(turns: Tensor) -> Tensor:
    """Without the whole turns."""
    return turns - turns.detach().round()


def _pairs(z: Tensor) -> Tensor:
    """The complex [..., N] as real [..., 2 N]."""
    return torch.view_as_real(z).flatten(-2)


def _product(x: Tensor, y: Tensor) -> Tensor:
    """`x @ y` of x [heads, B, ., .], where y may be one matrix of each head, or one of all."""
    if y.shape[:2] == (1, 1):
        return matmul(x, y[0, 0])
    if y.shape[1] == 1:
        rows = matmul(x.flatten(1, 2), y[:, 0])
        return rows.reshape(*x.shape[:3], y.shape[-1])
    return matmul(x, y)


def _inner(x: Tensor, y: Tensor) -> Tensor:
    """`<x, y>` of complex [heads, B, C, N] and [#heads, #B, D, N], real [heads, B, C, D]."""
    return _product(_pairs(x), _pairs(y).transpose(-1, -2))


def _sum(weights: Tensor, z: Tensor) -> Tensor:
    """Sums with real weights [heads, B, C, D] of complex [#heads, #B, D, N]."""
    sums: Tensor = _product(weights, _pairs(z)).unflatten(-1, (-1, 2))
    return torch.view_as_complex(sums)


def _complex(pairs: Tensor) -> Tensor:
    return torch.view_as_complex(pairs.contiguous())


def _by_group(x: Tensor, groups: int) -> Tensor:
    """[..., C, D] to [..., G, C, D / G]."""
    parts: Tensor = x.unflatten(-1, (groups, x.shape[-1] // groups))
    return parts.transpose(-2, -3)


def _from_groups(x: Tensor) -> Tensor:
    return x.transpose(-2, -3).flatten(-2)


def _scores(R: Tensor, kept: Tensor) -> Tensor:
    """`tril <R, kept>` [..., G, C, C] of R [..., C, N] and `kept = conj(c) A` [..., G, C, N]."""
    scores: Tensor = _inner(R, kept.flatten(-3, -2)).unflatten(-1, kept.shape[-3:-1])
    return scores.transpose(-2, -3).tril()


# ---------------------------------------------------------------------------------- forward


def _forward(
    v: Tensor, write: Tensor, read: Tensor, c: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Values [heads, B, L, D] and angles [heads, B, L]; plain autograd can differentiate it."""
    v, write, read = _finite(v), _finite(write), _finite(read)
    groups, harmonics = c.shape[1:3]
    conjugate = _complex(c).conj().resolve_conj()[:, None]  # [heads, 1, G, N]
    each = conjugate.repeat_interleave(v.shape[-1] // groups, dim=2)  # [heads, 1, D, N]
    S, outputs = _complex(state), []
    for start in range(0, v.shape[2], CHUNK):
        v_c, write_c, read_c = (t[:, :, start : start + CHUNK] for t in (v, write, read))
        A, R = (features(turns, harmonics, v.dtype) for turns in (write_c, read_c))
        scores = _scores(R, conjugate[..., None, :] * A[:, :, None])
        within = _from_groups(matmul(scores, _by_group(v_c, groups)))
        outputs.append(_inner(R, each * S) + within)
        S = S + _sum(v_c.transpose(-1, -2), A)
    return torch.cat(outputs, dim=2), torch.view_as_real(S)


@op("dlrnn::tape")
def _tape(  # noqa: PLR0917
    v: Tensor, write: Tensor, read: Tensor, c: Tensor, state: Tensor, moves: bool
) -> tuple[Tensor, Tensor]:
    """`_forward`; `moves` says whether `write` has gradients."""
    del moves
    return _forward(v, write, read, c, state)


@_tape.register_fake
def _(  # noqa: PLR0917
    v: Tensor, write: Tensor, read: Tensor, c: Tensor, state: Tensor, moves: bool
) -> tuple[Tensor, Tensor]:
    del write, read, c, moves
    return v.new_empty(v.shape), state.new_empty(state.shape)


# ---------------------------------------------------------------------------------- backward


@op("dlrnn::tape_gradients")
def _tape_gradients(  # noqa: PLR0917
    dy: Tensor,
    d_after: Tensor,
    v: Tensor,
    write: Tensor,
    read: Tensor,
    c: Tensor,
    after: Tensor,
    moves: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of v, write, read, c and the state, from the last chunk to the first.

    S is the state before a chunk, U the gradient of the state after it.
    """
    v, write, read = _finite(v), _finite(write), _finite(read)
    groups, harmonics = c.shape[1:3]
    width = v.shape[-1] // groups
    kernel = _complex(c)[:, None]  # [heads, 1, G, N]
    conjugate = kernel.conj().resolve_conj()
    each = kernel.repeat_interleave(width, dim=2)  # [heads, 1, D, N]
    each_conjugate = each.conj().resolve_conj()
    n = 2 * math.pi * torch.arange(harmonics, device=v.device, dtype=v.dtype)
    S, U = _complex(after), _complex(d_after)
    dv, dc = torch.empty_like(v), torch.zeros_like(kernel[:, 0])
    d_write, d_read = torch.zeros_like(write), torch.empty_like(read)
    for start in reversed(range(0, v.shape[2], CHUNK)):
        here = slice(start, start + CHUNK)
        v_c, dy_c = v[:, :, here], dy[:, :, here]
        A, R = (features(turns[:, :, here], harmonics, v.dtype) for turns in (write, read))
        S = S - _sum(v_c.transpose(-1, -2), A)
        dR = _sum(dy_c, each_conjugate * S)
        dv_c = _inner(U, A).transpose(-1, -2)
        moments = _sum(dy_c.transpose(-1, -2), R)  # [heads, B, D, N]
        dc += (moments.conj() * S).sum(1).unflatten(1, (groups, width)).sum(2)

        kept = conjugate[..., None, :] * A[:, :, None]  # [heads, #B, G, C, N]
        v_g, dy_g = _by_group(v_c, groups), _by_group(dy_c, groups)
        dv_c = dv_c + _from_groups(matmul(_scores(R, kept).transpose(-1, -2), dy_g))
        d_scores = matmul(dy_g, v_g.transpose(-1, -2)).tril()  # [heads, B, G, C, C]
        dR += _sum(d_scores.transpose(-2, -3).flatten(-2), kept.flatten(-3, -2))
        if kept.shape[1] != v.shape[1]:  # the sum over sequences is part of the product
            over = d_scores.permute(0, 2, 4, 1, 3).flatten(3).flatten(1, 2)[:, None]
            d_kept = _sum(over, R.flatten(1, 2)[:, None]).view_as(kept)
        else:
            d_kept = _sum(d_scores.transpose(-1, -2).flatten(-3, -2), R).view_as(kept)
        A_conjugate = A.conj().resolve_conj()  # a lazy conj of d_kept would copy G times as much
        dc += (d_kept * A_conjugate[:, :, None]).sum((1, 3)).conj()
        if moves:
            dA = _sum(v_c, U) + (kernel[..., None, :] * d_kept).sum(2)
            d_write[:, :, here] = matmul((A_conjugate * dA).imag, n)
        U = U + each * moments

        dv[:, :, here] = dv_c
        d_read[:, :, here] = matmul((R.conj() * dR).imag, n)
    return dv, d_write, d_read, torch.view_as_real(dc), torch.view_as_real(U)


@_tape_gradients.register_fake
def _(dy: Tensor, d_after: Tensor, *others: Any) -> tuple[Tensor, ...]:
    del dy, d_after
    return tuple(x.new_empty(x.shape) for x in others[:-1])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.moves = inputs
    ctx.save_for_backward(*tensors, output[1])


def _gradients(ctx: Any, dy: Tensor, d_after: Tensor) -> tuple[Tensor | None, ...]:
    *inputs, after = ctx.saved_tensors
    if torch.is_grad_enabled():  # for second derivatives: features of all positions
        own = [x.view_as(x) for x in inputs]
        wants = ctx.needs_input_grad[: len(own)]
        wanted = [x for x, wants_it in zip(own, wants, strict=True) if wants_it]
        given = torch.autograd.grad(
            _forward(*own), wanted, (dy, d_after), create_graph=True, materialize_grads=True
        )
        found = iter(given)
        return *(next(found) if wants_it else None for wants_it in wants), None
    dv, d_write, d_read, dc, d_state = _tape_gradients(dy, d_after, *inputs[:4], after, ctx.moves)
    return dv, d_write if ctx.moves else None, d_read, dc, d_state, None


_tape.register_autograd(_gradients, setup_context=_setup)
