"""The Vandermonde product of `ops.channel_vandermonde`, where every channel has its own lambda.

channel_vandermonde.cu says how: the product in fp32, the moments on tensor cores; |lambda| <= 1.
"""

import torch
from torch import Tensor

from dlrnn.ops.cuda import nvrtc, vandermonde
from dlrnn.ops.cuda.vandermonde import ROWS, STEP, WIDTH, add_parts, aligned, over, processors

BATCH, TILE = 256, 4096  # the product: states at a time, positions of a block
PRODUCT_BYTES = BATCH * 33 * 8 + 4 * 32 * 64 * 4  # shared memory


def supports(values: Tensor, log_lambda: Tensor) -> bool:
    """fp32 values on a Hopper GPU, and few rows a channel."""
    return vandermonde.supports(values, log_lambda) and values.shape[0] <= ROWS // 2


def product(W: Tensor, log_lambda: Tensor, length: int) -> Tensor:
    """`K_hk = Re(sum_n W_hn lambda_hn^k)`: W [rows, H, N, 2] -> [rows, H, length]."""
    (count, channels, states, _), device = W.shape, W.device
    rows, tiles, batches = count * channels, over(length, TILE), over(states, BATCH)
    share = over(batches, min(batches, max(1, 4 * processors(device) // (rows * tiles))))
    parts = over(batches, share)
    partial = W.new_empty(parts, over(rows * length, 4) * 4)
    _kernel("channel_product", PRODUCT_BYTES, device)(
        *(rows * tiles * parts, 256, aligned(W), aligned(log_lambda), partial),
        *(rows, channels, states, length, tiles, share * BATCH),
    )
    return add_parts(partial)[: rows * length].view(count, channels, length)


def adjoint(v: Tensor, log_lambda: Tensor) -> Tensor:
    """`M_hn = sum_k v_hk lambda_hn^k`: v [rows, H, L] -> pairs [rows, H, N, 2]."""
    moments = v.new_empty(v.shape[0], *log_lambda.shape)
    _moments(v, log_lambda, None, moments, moments)
    return moments


def gradients(dK: Tensor, W: Tensor, log_lambda: Tensor) -> tuple[Tensor, Tensor]:
    """Of the product: dW and d log_lambda, float64."""
    dW, d_log_lambda = W.new_empty(W.shape), log_lambda.new_empty(log_lambda.shape)
    _moments(dK, log_lambda, aligned(W), dW, d_log_lambda)
    return dW, d_log_lambda


def _moments(
    v: Tensor, log_lambda: Tensor, W: Tensor | None, result: Tensor, d_log_lambda: Tensor
) -> None:
    """The moments of v into result; given W, their conjugates, and d_log_lambda."""
    (count, channels, length), states, device = v.shape, log_lambda.shape[1], v.device
    slope, rows = int(W is not None), count * channels
    steps = over(length, STEP)
    share = over(steps, ROWS // ((1 + slope) * count))  # a channel's pieces fill a tile
    pieces = over(steps, share)
    values, back, shift = vandermonde.arranged(
        v.reshape(rows, length), channels, pieces, share, slope
    )
    _kernel("channel_moments", vandermonde.MOMENTS_BYTES, device)(
        *(channels * over(states, WIDTH), 384, values, back, aligned(log_lambda)),
        *(v if W is None else W, result, d_log_lambda),
        *(count, channels, states, pieces, share, shift, slope),
    )


def _kernel(name: str, shared_bytes: int, device: torch.device) -> nvrtc.Kernel:
    file, products = "channel_vandermonde.cu", vandermonde.products()
    return vandermonde.kernel(file, name, shared_bytes, device, products)
