"""The recurrence `x_k = lambda x_{k-1} + u_k`, `y_k = Re(W x_k)`: one step, or a chunk at once.

`W x` is the sum over the states, `sum_n W_n x_n`, without a conjugate.

A state is [B, H, N, 2], real pairs. Letters: u [B, L, H] or, for a step, [B, H]. `log_lambda` is
[N, 2], shared by the channels, or [H, N, 2], each channel its own.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dlrnn.ops.channel_vandermonde import channel_adjoint, channel_vandermonde
from dlrnn.ops.checks import in_transform
from dlrnn.ops.cuda import recurrence_step as kernels
from dlrnn.ops.dispatch import op, runs_eagerly, uses_fused
from dlrnn.ops.pairs import DLRExponents, has_float64, in_float64, pair_product, powers
from dlrnn.ops.two_floats import sum_of_products
from dlrnn.ops.vandermonde import COMPLEX, vandermonde, vandermonde_adjoint

LogLambda = Float[Tensor, "N 2"] | Float[Tensor, "H N 2"]


def step(
    u: Float[Tensor, "B H"],
    W: Float[Tensor, "H N 2"],
    log_lambda: LogLambda | DLRExponents,
    state: Float[Tensor, "B H N 2"],
    *,
    skip: Float[Tensor, " H"] | None = None,
    leaving: Float[Tensor, "B H"] | None = None,
    window: int = 0,
) -> tuple[Float[Tensor, "B H"], Float[Tensor, "B H N 2"]]:
    """One step: `x' = lambda x + u` and `y = Re(W x') + skip u`.

    With a kernel restricted to `window` entries, `leaving` is the input that is now so many steps
    old; its remainder, `lambda^window leaving`, is subtracted from the state.

    Computed in float64 and rounded once, to the state's dtype: a lambda rounded to fp32 would add a
    phase error with every step.
    """
    exponents, phase = _as_tensors(log_lambda)
    given = u, W, exponents, phase, state, skip, leaving
    if may_fuse(*given):
        y, x = _step_op(*given, window)
        return y, x
    uses_fused("step", u)  # raises if the fused kernel was requested
    return _step(*given, window)


def windowed_step(  # noqa: PLR0917
    u: Float[Tensor, "B H"],
    W: Float[Tensor, "H N 2"],
    log_lambda: LogLambda | DLRExponents,
    state: Float[Tensor, "B H N 2"],
    past: Float[Tensor, "B window H"],
    oldest: Int[Tensor, "1"],
    *,
    skip: Float[Tensor, " H"] | None = None,
) -> tuple[
    Float[Tensor, "B H"],
    Float[Tensor, "B H N 2"],
    Float[Tensor, "B window H"],
    Int[Tensor, "1"],
]:
    """A step with a restricted kernel; also the next `past` and `oldest`.

    `past` is a ring of the last `window` inputs. Its oldest one, at `oldest`, leaves the state, and
    u takes its place.
    """
    exponents, phase = _as_tensors(log_lambda)
    given = u, W, exponents, phase, state, skip, past
    if may_fuse(*given):
        y, x, past, oldest = _windowed_step_op(*given, oldest)
        return y, x, past, oldest
    uses_fused("step", u)  # raises if the fused kernel was requested
    return _windowed_step(*given, oldest)


def step_in_place(  # noqa: PLR0917
    u: Float[Tensor, "B H"],
    W: Float[Tensor, "H N 2"],
    log_lambda: LogLambda | DLRExponents,
    state: Float[Tensor, "B H N 2"],
    past: Float[Tensor, "B window H"],
    oldest: Int[Tensor, "1"],
    *,
    skip: Float[Tensor, " H"] | None = None,
) -> Float[Tensor, "B H"]:
    """Return y of `step`, or of `windowed_step` if `past` is not empty; the state is overwritten.

    It records no gradients. The state must be contiguous.
    """
    exponents, phase = _as_tensors(log_lambda)
    given = u, W, exponents, phase, state, skip
    ring = past if past.shape[1] else None
    if uses_fused("step", u, lambda: kernels.supports(u, W, exponents, state, ring)):
        y = kernels.step_in_place(*given, past, oldest)
        if ring is not None:
            oldest.add_(1).remainder_(past.shape[1])
        return y
    if ring is None:
        y, x = _step(*given, None, 0)
    else:
        y, x, new_past, new_oldest = _windowed_step(*given, past, oldest)
        past.copy_(new_past)
        oldest.copy_(new_oldest)
    state.copy_(x)
    return y


def _as_tensors(log_lambda: Tensor | DLRExponents) -> tuple[Tensor, Tensor | None]:
    """DLR's parameters, or log lambda in float64 and None."""
    if isinstance(log_lambda, Tensor):
        return in_float64(log_lambda), None
    if log_lambda.im is None or log_lambda.re.dtype != torch.float32:
        return log_lambda.log_lambda(), None
    return log_lambda


def may_fuse(u: Tensor, *others: Tensor | None) -> bool:
    """Whether nothing speaks against the fused kernel that a compiler must know."""
    compiler = torch.compiler  # Dynamo of torch 2.11 takes every compilation for an export
    if not u.is_cuda or (compiler.is_exporting() and not compiler.is_dynamo_compiling()):
        return False
    if in_transform():
        return False
    records = torch.is_grad_enabled()
    return all(x is None or (x.is_cuda and not (records and x.requires_grad)) for x in (u, *others))


def _step(  # noqa: PLR0917
    u: Tensor,
    W: Tensor,
    log_lambda: Tensor,
    phase: Tensor | None,
    state: Tensor,
    skip: Tensor | None,
    leaving: Tensor | None,
    window: int,
) -> tuple[Tensor, Tensor]:
    """`step` in PyTorch."""
    if phase is not None:
        log_lambda = DLRExponents(log_lambda, phase).log_lambda()
    lam = powers(log_lambda, 1)
    gone = None if leaving is None else powers(log_lambda, window)
    carry = _carry if runs_eagerly(u) else _carry_in_pairs
    carry = carry if has_float64(u.device) else _carry_in_two_parts
    y, x = carry(u, W, lam, state, gone, leaving)
    return (y.contiguous() if skip is None else torch.addcmul(y, skip, u)), x


def _carry(  # noqa: PLR0917
    u: Tensor, W: Tensor, lam: Tensor, state: Tensor, gone: Tensor | None, leaving: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`Re(W x')` and `x' = lam x + u - gone leaving`, in complex arithmetic."""
    lam, x = torch.view_as_complex(lam), torch.view_as_complex(state.contiguous())
    if torch.is_grad_enabled() and (x.requires_grad or lam.requires_grad):
        x = torch.addcmul(u.to(torch.complex128)[..., None], lam, x)
    else:  # in place: large temporary tensors cost more than the arithmetic
        x = x.to(torch.complex128, copy=True).mul_(lam).add_(u[..., None])
    if gone is not None and leaving is not None:
        inputs = leaving.to(x.dtype)[..., None]
        x = torch.addcmul(x, torch.view_as_complex(gone), inputs, value=-1)
    x = x.to(COMPLEX[state.dtype])
    products = torch.view_as_complex(W.contiguous()) * x.to(COMPLEX[W.dtype])
    return products.sum(-1).real, torch.view_as_real(x)


def _carry_in_pairs(  # noqa: PLR0917
    u: Tensor, W: Tensor, lam: Tensor, state: Tensor, gone: Tensor | None, leaving: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The same in real arithmetic, which compilers fuse."""
    lam_re, lam_im = lam.unbind(-1)  # [N] or [H, N]
    x_re, x_im = state.double().unbind(-1)  # [B, H, N]
    re = torch.addcmul(u[..., None], lam_re, x_re).addcmul_(lam_im, x_im, value=-1)
    im = (lam_re * x_im).addcmul_(lam_im, x_re)
    if gone is not None and leaving is not None:
        re = re - gone[..., 0] * leaving[..., None]
        im = im - gone[..., 1] * leaving[..., None]
    x = torch.stack((re.to(state.dtype), im.to(state.dtype)), dim=-1)
    products = W * x.to(W.dtype)  # no matrix product: autocast would round it
    return (products[..., 0] - products[..., 1]).sum(-1), x


def _carry_in_two_parts(  # noqa: PLR0917
    u: Tensor, W: Tensor, lam: Tensor, state: Tensor, gone: Tensor | None, leaving: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The same without float64: lambda, from the CPU, is the sum of two fp32 numbers."""
    high = lam.float()
    low = (lam - high).float().to(u.device)
    (h_re, h_im), (x_re, x_im) = high.to(u.device).unbind(-1), state.unbind(-1)
    small_re, small_im = pair_product(low, state).unbind(-1)
    re = sum_of_products([(h_re, x_re), (-h_im, x_im)], u[..., None], small_re)
    im = sum_of_products([(h_re, x_im), (h_im, x_re)], torch.zeros_like(x_im), small_im)
    x = torch.stack((re, im), dim=-1)
    if gone is not None and leaving is not None:
        x = x - gone.to(x) * leaving[..., None, None]
    products = W * x
    return (products[..., 0] - products[..., 1]).sum(-1), x


def _windowed_step(  # noqa: PLR0917
    u: Tensor,
    W: Tensor,
    log_lambda: Tensor,
    phase: Tensor | None,
    state: Tensor,
    skip: Tensor | None,
    past: Tensor,
    oldest: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`windowed_step` in PyTorch."""
    window, leaving = past.shape[1], past.index_select(1, oldest)[:, 0]
    y, x = _step(u, W, log_lambda, phase, state, skip, leaving, window)
    return y, x, past.index_copy(1, oldest, u[:, None]), (oldest + 1) % window


# ---------------------------------------------------------------------------------- fused


@op("dlrnn::step", replays=True)
def _step_op(  # noqa: PLR0917
    u: Tensor,
    W: Tensor,
    log_lambda: Tensor,
    phase: Tensor | None,
    state: Tensor,
    skip: Tensor | None,
    leaving: Tensor | None,
    window: int,
) -> tuple[Tensor, Tensor]:
    arguments = u, W, log_lambda, phase, state, skip, leaving, window
    if uses_fused("step", u, lambda: kernels.supports(u, W, log_lambda, state, leaving)):
        return kernels.step(*arguments)
    return _step(*arguments)


@_step_op.register_fake
def _(u: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    state: Tensor = others[3]
    return u.new_empty(u.shape), state.new_empty(state.shape)


@op("dlrnn::windowed_step", replays=True)
def _windowed_step_op(  # noqa: PLR0917
    u: Tensor,
    W: Tensor,
    log_lambda: Tensor,
    phase: Tensor | None,
    state: Tensor,
    skip: Tensor | None,
    past: Tensor,
    oldest: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    arguments = u, W, log_lambda, phase, state, skip, past, oldest
    if uses_fused("step", u, lambda: kernels.supports(u, W, log_lambda, state, past)):
        return kernels.windowed_step(*arguments)
    return _windowed_step(*arguments)


@_windowed_step_op.register_fake
def _(u: Tensor, *others: Any) -> tuple[Tensor, ...]:
    state, past, oldest = others[3], *others[5:]
    return tuple(each.new_empty(each.shape) for each in (u, state, past, oldest))


# ---------------------------------------------------------------------------------- chunks


def advance(
    u: Float[Tensor, "B L H"],
    log_lambda: LogLambda,
    state: Float[Tensor, "B H N 2"] | None = None,
    lengths: Int[Tensor, " B"] | None = None,
) -> Float[Tensor, "B H N 2"]:
    """The state after a chunk: `lambda^L x + sum_j lambda^(L-1-j) u_j`.

    With `lengths`, u is aligned to the right (see `align_right`), and L is each sequence's own.
    """
    adjoint = vandermonde_adjoint if log_lambda.dim() == 2 else channel_adjoint
    moments = adjoint(u.flip(1).transpose(1, 2), log_lambda)
    if state is None:
        return moments
    count = u.shape[1] if lengths is None else lengths[:, None, None]
    decay = powers(log_lambda, count)  # log_lambda's shape, or [B, 1 or H, N, 2]
    wide = state.double() if has_float64(state.device) else state
    return (moments + pair_product(decay.to(wide), wide)).to(state.dtype)


def response(
    W: Float[Tensor, "H N 2"],
    log_lambda: LogLambda,
    state: Float[Tensor, "B H N 2"],
    length: int,
) -> Float[Tensor, "B {length} H"]:
    """A state's part in the next outputs: `Re(W lambda^(k+1) x)` for k = 0 .. length-1."""
    lam = powers(log_lambda, 1).to(state)
    weight = pair_product(W, pair_product(lam, state))
    product = vandermonde if log_lambda.dim() == 2 else channel_vandermonde
    return product(weight, log_lambda, length).transpose(1, 2)


def align_right(u: Float[Tensor, "B L H"], lengths: Int[Tensor, " B"]) -> Float[Tensor, "B L H"]:
    """Move each sequence's `lengths[b]` entries to the end, zeros before them."""
    length = u.shape[1]
    source = torch.arange(length, device=u.device) - (length - lengths[:, None])  # [B, L]
    moved = u.gather(1, source.clamp(0, length - 1)[..., None].expand_as(u))
    return moved.masked_fill((source < 0)[..., None], 0)
