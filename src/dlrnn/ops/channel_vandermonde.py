"""The Vandermonde product when every channel has its own lambda: `K_h = Re(W_h P_h)`.

As in `vandermonde.py` a position is `k = a + S b`, and a channel's kernel is one real product of
the scaled weights `W lambda^(S b)` with the fine table `lambda^a`. Here no two channels share a
table: a few channels at a time have theirs made (N S + N L/S numbers each), used in one batched
product, and dropped. The layout is [channels, N, (re, im), rows, blocks]: the sum over N and
(re, im) is one dimension of that product. Each op is the other's derivative:

    dW = conj(adjoint(dK)),     d log lambda_hn = W_hn adjoint(k dK)_hn .
"""

import math
from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from dlrnn.ops.checks import require, require_dtype, require_no_transform, require_shape
from dlrnn.ops.cuda import channel_vandermonde as kernels
from dlrnn.ops.dispatch import uses_fused
from dlrnn.ops.pairs import in_float64, pair_product, powers
from dlrnn.ops.vandermonde import (
    are_together,
    fine_table,
    matmul,
    table_split,
    with_derivatives,
    workspace,
)


def channel_vandermonde(
    W: Float[Tensor, "*rows H N 2"], log_lambda: Float[Tensor, "H N 2"], length: int
) -> Float[Tensor, "*rows H {length}"]:
    """`K_hk = Re(sum_n W_hn lambda_hn^k)` for k = 0 .. length-1, in the precision of W."""
    _check(W, log_lambda)
    rows = tuple("." for _ in W.shape[:-3])
    require_shape("W", W, (*rows, *log_lambda.shape))
    if length < 1:
        raise ValueError(f"length must be at least 1, not {length}")
    flat = W.reshape(math.prod(W.shape[:-3]), *log_lambda.shape)
    kernel: Tensor = _product_op(flat, in_float64(log_lambda), length, False)
    return kernel.reshape(*W.shape[:-2], length)


def channel_adjoint(
    v: Float[Tensor, "*rows H L"], log_lambda: Float[Tensor, "H N 2"]
) -> Float[Tensor, "*rows H N 2"]:
    """`M_hn = sum_k v_hk lambda_hn^k`, pairs, in the precision of v."""
    _check(v, log_lambda)
    rows = tuple("." for _ in v.shape[:-2])
    require_shape("v", v, (*rows, log_lambda.shape[0], "L"))
    flat = v.reshape(math.prod(v.shape[:-2]), *v.shape[-2:])
    moments: Tensor = _adjoint_op(flat, in_float64(log_lambda), False)
    return moments.reshape(*v.shape[:-2], *log_lambda.shape)


def _check(values: Tensor, log_lambda: Tensor) -> None:
    require_no_transform()
    require_dtype("the values of a Vandermonde product", values)
    require_shape("log_lambda", log_lambda, ("H", "N", 2))
    require(
        are_together(values, log_lambda),
        f"values are on {values.device}, log_lambda on {log_lambda.device}: move one of them",
    )


# ---------------------------------------------------------------------------------- forward


def _product(W: Tensor, log_lambda: Tensor, length: int, tf32: bool) -> Tensor:
    if uses_fused("channel_vandermonde", W, lambda: kernels.supports(W, log_lambda)):
        return kernels.product(W, log_lambda, length)  # without tensor cores: never tf32
    rows, channels, states, _ = W.shape
    split, blocks = table_split(W, length)
    kernel = W.new_empty(rows, channels, blocks, split)
    for h, width, row_tiles in _tiles(W, states, split, blocks):
        fine = _table(log_lambda[h], split, W).flatten(1, 2)  # [h, N 2, S]
        coarse = _table(split * log_lambda[h], width, W)  # [h, N, 2, b]
        for start in range(0, blocks, width):
            b = slice(start, min(start + width, blocks))
            first = powers(log_lambda[h], split * start).to(W)
            for r in row_tiles:
                weight = pair_product(W[r, h], first)  # [r, h, N, 2]
                scaled = _scaled(weight, coarse[..., : b.stop - start])  # [h, N 2, r b]
                product = matmul(scaled.transpose(1, 2), fine)  # [h, r b, S]
                product = product.unflatten(1, (len(weight), b.stop - start))
                kernel[r, h, b] = product.transpose(0, 1)
                del scaled, product
    return kernel.flatten(2)[..., :length].contiguous()


def _scaled(weight: Tensor, coarse: Tensor) -> Tensor:
    """(Re, -Im) of `W lambda^(S b)`; weight [r, h, N, 2], coarse [h, N, 2, b] -> [h, N 2, r b]."""
    W_re, W_im = weight.permute(3, 1, 2, 0)[..., None]  # [h, N, r, 1] each
    c_re, c_im = coarse[:, :, :, None].unbind(2)  # [h, N, 1, b] each
    channels, states, rows, _ = W_re.shape
    scaled = weight.new_empty(channels, states, 2, rows, coarse.shape[-1])
    torch.mul(W_re, c_re, out=scaled[:, :, 0]).addcmul_(W_im, c_im, value=-1)
    torch.mul(-W_re, c_im, out=scaled[:, :, 1]).addcmul_(W_im, c_re, value=-1)
    return scaled.view(channels, 2 * states, rows * coarse.shape[-1])


# ---------------------------------------------------------------------------------- adjoint


def _adjoint(v: Tensor, log_lambda: Tensor, tf32: bool) -> Tensor:
    if uses_fused("channel_adjoint", v, lambda: kernels.supports(v, log_lambda)):
        return kernels.adjoint(v, log_lambda, tf32=tf32)
    (rows, channels, length), states = v.shape, log_lambda.shape[1]
    split, blocks = table_split(v, length)
    v = torch.nn.functional.pad(v, (0, blocks * split - length)).unflatten(2, (blocks, split))
    moments = v.new_zeros(rows, channels, states, 2)
    for h, width, row_tiles in _tiles(v, states, split, blocks):
        fine = _table(log_lambda[h], split, v).flatten(1, 2)  # [h, N 2, S]
        coarse = _table(split * log_lambda[h], width, v)  # [h, N, 2, b]
        for start in range(0, blocks, width):
            b = slice(start, min(start + width, blocks))
            first = powers(log_lambda[h], split * start).to(v)
            for r in row_tiles:
                values = v[r, h, b].transpose(0, 1)  # [h, r, b, S]
                partial = matmul(fine, values.flatten(1, 2).transpose(1, 2))  # sum over a
                partial = partial.unflatten(2, values.shape[1:3])  # [h, N 2, r, b]
                total = _summed(partial, coarse[..., : b.stop - start])
                moments[r, h] += pair_product(total, first)
                del partial
    return moments


def _summed(partial: Tensor, coarse: Tensor) -> Tensor:
    """The sum over b of `partial lambda^(S b)`; [h, N 2, r, b] and [h, N, 2, b] -> [r, h, N, 2]."""
    re, im = partial.unflatten(1, (-1, 2)).unbind(2)  # [h, N, r, b] each
    c_re, c_im = coarse[:, :, :, None].unbind(2)  # [h, N, 1, b] each
    total_re = (re * c_re).addcmul_(im, c_im, value=-1).sum(-1)
    total_im = (re * c_im).addcmul_(im, c_re).sum(-1)
    return torch.stack((total_re, total_im), dim=-1).permute(2, 0, 1, 3)


_product_op, _adjoint_op, _ = with_derivatives(
    ("dlrnn::channel_vandermonde", "dlrnn::channel_adjoint", "dlrnn::channel_gradients"),
    *(_product, _adjoint, kernels),
)


# ---------------------------------------------------------------------------------- tables


def _table(log_lambda: Tensor, count: int, like: Tensor) -> Tensor:
    """`lambda_hn^a` for a < count, [h, N, 2, count]."""
    channels, states, _ = log_lambda.shape
    table = fine_table(log_lambda.flatten(0, 1), count, like)
    return table.view(channels, states, 2, count)


def _tiles(
    values: Tensor, states: int, split: int, blocks: int
) -> Iterator[tuple[slice, int, list[slice]]]:
    """Pieces of the channels, each with the blocks to take at once and pieces of the rows.

    A table and a temporary fit the workspace, except that one fine table may hold N S numbers.
    """
    (rows, channels), numbers = values.shape[:2], workspace(values)
    width = min(blocks, max(1, numbers // (2 * states)))
    r_step = min(rows, max(1, numbers // (states * width))) or 1
    h_step = max(1, numbers // (states * max(split, width * r_step)))
    row_tiles = [slice(r, min(r + r_step, rows)) for r in range(0, rows, r_step)]
    for h in range(0, channels, h_step):
        yield slice(h, min(h + h_step, channels)), width, row_tiles
