"""The Vandermonde product, its adjoint and its gradients on tensor cores.

They have the meaning of the functions of `ops.vandermonde`, for |lambda| <= 1: larger powers become
infinite. No result is added atomically: a sum over several blocks is the sum of partial results.
Products have the precision of fp32, or of tf32 if PyTorch was told so
(`torch.set_float32_matmul_precision("high")`) or if the result meets 16-bit numbers (`tf32`).

Hopper GPUs have kernels of their own, all others of compute capability 8.0 or later the portable
ones. Both read the same tables and share what runs before and after the products.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from dlrnn.common.device import multiprocessors
from dlrnn.ops.cuda import nvrtc
from dlrnn.ops.cuda.nvrtc import aligned, ceil_div

CHUNK, HEIGHT, TILE = 32, 32, 512  # the product: states of a chunk; rows and positions of a tile
STEP, ROWS, WIDTH = 64, 64, 128  # the moments: positions of a step; rows and states of a tile
STEPS, PIECES = 512, 64  # at most: steps that are added in fp32, parts of a sum
COARSE = 64  # tiles between two entries of the coarse table of powers
SEGMENT = 16384  # entries of a row of which one block finds the largest
TABLE, WEIGHTS, MOMENTS_STAGE = 32768, 8192 + 1024, 16384  # bytes
BYTES_A_STEP = 2.5e6  # of device memory, while a block multiplies for one chunk or step


class Kernels(NamedTuple):
    """The kernels for some GPUs: files, threads of a block, and bytes of its shared memory."""

    headers: tuple[str, ...]
    product: str
    threads: int
    product_bytes: int
    moments_bytes: int


HEADERS = "device.cuh", "wgmma.cuh", "moments.cuh", "vandermonde.cuh"
HOPPER = Kernels(
    (*HEADERS, "moments_hopper.cuh"),
    *("vandermonde_hopper.cu", 384),
    *(4 * (TABLE + WEIGHTS) + 64, 8 * MOMENTS_STAGE + 128),  # two mbarriers for each stage
)
PORTABLE = Kernels(
    (*HEADERS, "mma.cuh", "moments_portable.cuh"),
    *("vandermonde_portable.cu", 256),
    *(2 * TABLE + 3 * WEIGHTS, 4 * MOMENTS_STAGE),
)


def kernels_for(device: torch.device) -> Kernels:
    """Those for this GPU."""
    return HOPPER if nvrtc.capability(device) == (9, 0) else PORTABLE


def supports(values: Tensor, log_lambda: Tensor) -> bool:
    """fp32 values on a GPU of compute capability 8.0 or later."""
    fits = values.dtype == torch.float32 and log_lambda.numel() > 0
    return fits and nvrtc.runs_on(values)


def vandermonde(W: Tensor, log_lambda: Tensor, length: int, *, tf32: bool = False) -> Tensor:
    """`K_k = Re(sum_n W_n lambda_n^k)`: W [rows, N, 2], log_lambda [N, 2] -> [rows, length]."""
    (rows, given_states, _), device = W.shape, W.device
    row_tiles, tiles = ceil_div(rows, HEIGHT), ceil_div(length, TILE)
    chunks = ceil_div(given_states, CHUNK)
    fine, far, states = min(tiles, COARSE), ceil_div(tiles, COARSE), CHUNK * chunks
    table = W.new_empty(chunks, 4, 2, 2, 128, 8, dtype=torch.float16)
    powers = W.new_empty(1 + fine + far, states, 2, dtype=torch.float64)
    block_tile_coarse = powers[0], powers[1 : 1 + fine], powers[1 + fine :]
    weights, inverse_scale = W.new_empty(row_tiles * HEIGHT, states, 2), W.new_empty(rows)
    _auxiliary("prepare", device)(
        *(chunks + row_tiles * HEIGHT, 512, aligned(log_lambda), aligned(W)),
        *(table, *block_tile_coarse, weights, inverse_scale),
        *(rows, given_states, states, fine, far),
    )
    blocks = row_tiles * tiles
    share, parts = split_sum(
        chunks, multiprocessors(device), lambda parts: blocks * parts, 8 * rows * length
    )
    partial = W.new_empty(parts, ceil_div(rows * length, 4) * 4)
    kernels = kernels_for(device)
    kernel(kernels.product, "product", kernels.product_bytes, device, products(tf32=tf32))(
        *(
            blocks * parts,
            kernels.threads,
            weights,
            inverse_scale,
            table,
            *block_tile_coarse,
            partial,
        ),
        *(rows, row_tiles, tiles, length, states, share),
    )
    return add_parts(partial)[: rows * length].view(rows, length)


def adjoint(v: Tensor, log_lambda: Tensor, *, tf32: bool = False) -> Tensor:
    """`M_n = sum_k v_k lambda_n^k`: v [rows, L], log_lambda [N, 2] -> pairs [rows, N, 2]."""
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
    (rows, length), states, device = v.shape, log_lambda.shape[0], v.device
    v, log_lambda, with_derivative = aligned(v), aligned(log_lambda), int(W is not None)
    height, steps = (1 + with_derivative) * rows, ceil_div(length, STEP)

    def blocks(pieces: int) -> int:
        return ceil_div(states, WIDTH) * ceil_div(height * pieces, ROWS)

    bytes_a_part = 16 * height * states
    share, pieces = split_sum(steps, multiprocessors(device), blocks, bytes_a_part, STEPS)
    values, inverse_scale, shift = moments_operand(v, 1, pieces, share, with_derivative)
    partial = v.new_empty(height * pieces, states, 2)
    kernels, tiles = kernels_for(device), ceil_div(states, WIDTH) * values.shape[0]
    kernel("vandermonde_moments.cu", "moments", kernels.moments_bytes, device, products(tf32=tf32))(
        *(tiles, kernels.threads, values, log_lambda, partial),
        *(height * pieces, states, share),
    )
    result, d_log_lambda = moments_results(v, log_lambda, W)
    _auxiliary("finish", device)(
        *(ceil_div(states, 8), 512, partial, inverse_scale, log_lambda, v if W is None else W),
        *(result, d_log_lambda, rows, states, pieces, share * STEP, shift, with_derivative),
    )
    return result, d_log_lambda


def moments_results(v: Tensor, log_lambda: Tensor, W: Tensor | None) -> tuple[Tensor, Tensor]:
    """Empty tensors for the moments and, given W, for d log_lambda; else the first one twice."""
    result = v.new_empty(v.shape[0], *log_lambda.shape)
    return result, result if W is None else log_lambda.new_empty(log_lambda.shape)


def moments_operand(
    v: Tensor, channels: int, pieces: int, steps: int, with_derivative: int
) -> tuple[Tensor, Tensor, int]:
    """The rows of v, and of k v / 2^shift, scaled and in fp16 parts; the inverse scale; shift.

    A tile has 64 rows: pieces, of so many steps, of the rows of v. With several channels v has
    [rows / channels, channels] rows, and each channel has a tile.
    """
    (rows, length), device = v.shape, v.device
    v, segments, shift = aligned(v), ceil_div(length, SEGMENT), (length - 1).bit_length()
    maxima, inverse_scale = v.new_empty(rows, segments), v.new_empty(rows)
    _auxiliary("largest", device)(rows * segments, 256, v, maxima, length, segments)
    tiles = channels if channels > 1 else ceil_div((1 + with_derivative) * rows * pieces, ROWS)
    values = v.new_empty(tiles, steps, 2, STEP // 8, ROWS, 8, dtype=torch.float16)
    groups, eights = (rows, ceil_div(pieces, 8)) if channels > 1 else (ceil_div(rows, 8), pieces)
    _auxiliary("values", device)(
        *(groups * ceil_div(eights * steps * STEP, 1024), 256, v, maxima, values, inverse_scale),
        *(rows, channels, length, segments, pieces, steps, shift, with_derivative),
    )
    return values, inverse_scale, shift


def add_parts(partial: Tensor) -> Tensor:
    """The sum over the first dimension; the second is a multiple of 4."""
    if partial.shape[0] == 1:
        return partial[0]
    (parts, entries), total = partial.shape, torch.empty_like(partial[0])
    blocks = ceil_div(entries // 4, 256)
    _auxiliary("add", partial.device)(blocks, 256, partial, total, entries // 4, parts)
    return total


def split_sum(
    steps: int,
    processors: int,
    blocks: Callable[[int], int],
    bytes_a_part: int,
    longest: int = 2**30,
) -> tuple[int, int]:
    """Split a sum of `steps` so that it takes few waves of blocks and little adding.

    Returns the steps of a part, at most `longest` if PIECES parts suffice, and the number of parts.
    `blocks(parts)` is the number of blocks that so many parts take.
    """
    start = 4  # steps that the beginning and the end of a block take

    def cost(parts: int) -> float:
        waves = ceil_div(blocks(parts), processors)
        return waves * (ceil_div(steps, parts) + start) + parts * bytes_a_part / BYTES_A_STEP

    fewest = min(ceil_div(steps, longest), PIECES)
    share = ceil_div(steps, min(range(fewest, min(PIECES, steps) + 1), key=cost))
    return share, ceil_div(steps, share)


def products(*, tf32: bool = False) -> int:
    """How many products of fp16 parts form a product of fp32 numbers."""
    return 1 if tf32 or torch.backends.cuda.matmul.fp32_precision == "tf32" else 3


def _auxiliary(name: str, device: torch.device) -> nvrtc.Kernel:
    return _load((*HEADERS, "vandermonde_prologue_epilogue.cu"), name, 0, device, 3)


def kernel(
    file: str, name: str, shared_bytes: int, device: torch.device, products: int
) -> nvrtc.Kernel:
    """A kernel of one of the files that follow the headers."""
    return _load((*kernels_for(device).headers, file), name, shared_bytes, device, products)


def _load(
    files: tuple[str, ...], name: str, shared_bytes: int, device: torch.device, products: int
) -> nvrtc.Kernel:
    defines = ("STORAGE_BITS", 32), ("PRODUCTS", products)
    return nvrtc.load(files, name, defines, shared_bytes, device.index)
