"""The Vandermonde product of `ops.channel_vandermonde`, where every channel has its own lambda.

channel_vandermonde.cu computes the product in fp32, and the moments on tensor cores; |lambda| <= 1.
"""

import torch
from torch import Tensor

from dlrnn.common.device import multiprocessors
from dlrnn.ops.cuda import nvrtc, vandermonde
from dlrnn.ops.cuda.nvrtc import aligned, ceil_div
from dlrnn.ops.cuda.vandermonde import ROWS, STEP, WIDTH

BATCH, TILE = 256, 4096  # the product: states at a time, positions of a block
PRODUCT_BYTES = BATCH * 33 * 8 + 4 * 32 * 64 * 4  # shared memory
ROW_BYTES = 8 * WIDTH  # shared memory for the moments of a row, and for the powers of a piece
PIECES = {vandermonde.HOPPER: ROWS, vandermonde.PORTABLE: ROWS // 2}  # of a row, at most


def supports(values: Tensor, log_lambda: Tensor) -> bool:
    """fp32 values on a GPU of compute capability 8.0 or later, few rows for each channel."""
    return vandermonde.supports(values, log_lambda) and values.shape[0] <= ROWS // 2


def product(W: Tensor, log_lambda: Tensor, length: int) -> Tensor:
    """`K_hk = Re(sum_n W_hn lambda_hn^k)`: W [rows, H, N, 2] -> [rows, H, length]."""
    (count, channels, states, _), device = W.shape, W.device
    rows, tiles, batches = count * channels, ceil_div(length, TILE), ceil_div(states, BATCH)
    wanted = max(1, 4 * multiprocessors(device) // (rows * tiles))
    share = ceil_div(batches, min(batches, wanted))
    parts = ceil_div(batches, share)
    partial = W.new_empty(parts, ceil_div(rows * length, 4) * 4)
    _kernel("channel_product", PRODUCT_BYTES, device)(
        *(rows * tiles * parts, 256, aligned(W), aligned(log_lambda), partial),
        *(rows, channels, states, length, tiles, share * BATCH),
    )
    total = vandermonde.add_parts(partial)
    return total[: rows * length].view(count, channels, length)


def adjoint(v: Tensor, log_lambda: Tensor, *, tf32: bool = False) -> Tensor:
    """`M_hn = sum_k v_hk lambda_hn^k`: v [rows, H, L] -> pairs [rows, H, N, 2]."""
    return _moments(v, log_lambda, tf32=tf32)[0]


def gradients(
    dK: Tensor, W: Tensor, log_lambda: Tensor, *, tf32: bool = False
) -> tuple[Tensor, Tensor]:
    """The gradients of the product: dW, and d log_lambda in float64."""
    return _moments(dK, log_lambda, aligned(W), tf32=tf32)


def _moments(
    v: Tensor, log_lambda: Tensor, W: Tensor | None = None, *, tf32: bool = False
) -> tuple[Tensor, Tensor]:
    """The moments of v; given W, the gradients."""
    (count, channels, length), states, device = v.shape, log_lambda.shape[1], v.device
    with_derivative, rows = int(W is not None), count * channels
    steps = ceil_div(length, STEP)
    kernels = vandermonde.kernels_for(device)
    most = min(ROWS // ((1 + with_derivative) * count), PIECES[kernels])
    share = ceil_div(steps, most)  # the pieces fill a tile
    pieces = ceil_div(steps, share)
    values, inverse_scale, shift = vandermonde.moments_operand(
        v.reshape(rows, length), channels, pieces, share, with_derivative
    )
    result, d_log_lambda = vandermonde.moments_results(v, log_lambda, W)
    shared_bytes = max(kernels.moments_bytes, (ROWS + PIECES[kernels]) * ROW_BYTES)
    _kernel("channel_moments", shared_bytes, device, tf32=tf32)(
        *(channels * ceil_div(states, WIDTH), kernels.threads, values, inverse_scale),
        *(aligned(log_lambda), v if W is None else W, result, d_log_lambda),
        *(count, channels, states, pieces, share, shift, with_derivative),
    )
    return result, d_log_lambda


def _kernel(
    name: str, shared_bytes: int, device: torch.device, *, tf32: bool = False
) -> nvrtc.Kernel:
    file, products = "channel_vandermonde.cu", vandermonde.products(tf32=tf32)
    return vandermonde.kernel(file, name, shared_bytes, device, products)
