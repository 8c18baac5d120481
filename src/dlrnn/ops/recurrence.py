"""The recurrence `x_k = lambda x_{k-1} + u_k`, `y_k = Re(W x_k)`: one step, or a chunk at once.

`W x` is the sum over the states, `sum_n W_n x_n`, without a conjugate.

A state is [B, H, N, 2], real pairs. Letters: u [B, L, H] or, for a step, [B, H]. `log_lambda` is
[N, 2], shared by the channels, or [H, N, 2], each channel its own.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dlrnn.ops.channel_vandermonde import channel_adjoint, channel_vandermonde
from dlrnn.ops.dispatch import uses_fused
from dlrnn.ops.pairs import pair_product, powers
from dlrnn.ops.vandermonde import vandermonde, vandermonde_adjoint

LogLambda = Float[Tensor, "N 2"] | Float[Tensor, "H N 2"]


def step(
    u: Float[Tensor, "B H"],
    W: Float[Tensor, "H N 2"],
    log_lambda: LogLambda,
    state: Float[Tensor, "B H N 2"],
    *,
    leaving: Float[Tensor, "B H"] | None = None,
    window: int = 0,
) -> tuple[Float[Tensor, "B H"], Float[Tensor, "B H N 2"]]:
    """One step: `x' = lambda x + u` and `y = Re(W x')`.

    With a restricted kernel, `leaving` is the input that is now `window` steps old; its remainder,
    `lambda^window leaving`, is subtracted from the state.

    Computed in float64 and rounded once, to the state's dtype: a lambda rounded to fp32 would add a
    phase error with every step.
    """
    uses_fused("step", u)
    lam_re, lam_im = powers(log_lambda, 1).unbind(-1)  # [N] or [H, N]
    x_re, x_im = state.double().unbind(-1)  # [B, H, N]
    re = torch.addcmul(u[..., None], lam_re, x_re).addcmul_(lam_im, x_im, value=-1)
    im = (lam_re * x_im).addcmul_(lam_im, x_re)
    if leaving is not None:
        gone = powers(log_lambda, window) * leaving[..., None, None]
        re, im = re - gone[..., 0], im - gone[..., 1]
    x = torch.stack((re.to(state.dtype), im.to(state.dtype)), dim=-1)
    products = W * x.to(W.dtype)  # no matrix product: autocast would round it
    return (products[..., 0] - products[..., 1]).sum(-1), x


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
    return (moments + pair_product(decay, state.double())).to(state.dtype)


def response(
    W: Float[Tensor, "H N 2"],
    log_lambda: LogLambda,
    state: Float[Tensor, "B H N 2"],
    length: int,
) -> Float[Tensor, "B {length} H"]:
    """A state's part in the next outputs: `Re(W lambda^(k+1) x)` for k = 0 .. length-1."""
    lam = powers(log_lambda, 1).to(state.dtype)
    weight = pair_product(W, pair_product(lam, state))
    product = vandermonde if log_lambda.dim() == 2 else channel_vandermonde
    return product(weight, log_lambda, length).transpose(1, 2)


def align_right(u: Float[Tensor, "B L H"], lengths: Int[Tensor, " B"]) -> Float[Tensor, "B L H"]:
    """Move each sequence's `lengths[b]` entries to the end, zeros before them."""
    length = u.shape[1]
    source = torch.arange(length, device=u.device) - (length - lengths[:, None])  # [B, L]
    moved = u.gather(1, source.clamp(0, length - 1)[..., None].expand_as(u))
    return moved.masked_fill((source < 0)[..., None], 0)
