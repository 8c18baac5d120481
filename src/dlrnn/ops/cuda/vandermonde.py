"""The Vandermonde product, its adjoint and its gradients on tensor cores; vandermonde.cu says how.

The meaning is that of `ops.vandermonde`'s own functions, for |lambda| <= 1: larger powers become
infinite. Nothing is added atomically: a sum over several blocks is a sum of partial results.
Products are those of fp32, unless PyTorch was told that tf32 will do
(`torch.set_float32_matmul_precision("high")`).
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from dlrnn.ops.cuda import nvrtc

CHUNK, HEIGHT, TILE = 32, 32, 512  # the product: states at a time; rows and positions of a tile
STEP, ROWS, WIDTH = 64, 64, 128  # the moments: positions at a time; rows and states of a tile
STEPS, PIECES = 512, 64  # at most: steps that are added in fp32, parts of a sum
LEAP = 64  # tiles between two entries of the coarser table
SEGMENT = 16384  # entries of a row whose largest one block finds
PRODUCT_BYTES = 4 * (32768 + 8192 + 1024) + 64  # shared memory: four stages, two barriers each
MOMENTS_BYTES = 8 * 16384 + 128
BYTES_A_STEP = 2.5e6  # of device memory, while a block multiplies for one chunk or step


def supports(values: Tensor, log_lambda: Tensor) -> bool:
    """fp32 values on a Hopper GPU, the one that has these instructions."""
    return (
        values.is_cuda
        and values.dtype == torch.float32
        and min(values.numel(), log_lambda.numel()) > 0
        and torch.cuda.get_device_capability(values.device) == (9, 0)
        and nvrtc.available()
    )


def vandermonde(W: Tensor, log_lambda: Tensor, length: int) -> Tensor:
    """`K_k = Re(sum_n W_n lambda_n^k)`: W [rows, N, 2], log_lambda [N, 2] -> [rows, length]."""
    (rows, known, _), device = W.shape, W.device
    row_tiles, tiles, chunks = over(rows, HEIGHT), over(length, TILE), over(known, CHUNK)
    fine, leaps, states = min(tiles, LEAP), over(tiles, LEAP), CHUNK * chunks
    table = W.new_empty(chunks, 4, 2, 2, 128, 8, dtype=torch.float16)
    powers = W.new_empty(1 + fine + leaps, states, 2, dtype=torch.float64)
    scales = powers[0], powers[1 : 1 + fine], powers[1 + fine :]
    weights, back = W.new_empty(row_tiles * HEIGHT, states, 2), W.new_empty(rows)
    _ends("prepare", device)(
        *(chunks + row_tiles * HEIGHT, 512, aligned(log_lambda), aligned(W)),
        *(table, *scales, weights, back, rows, known, states, fine, leaps),
    )
    blocks = row_tiles * tiles
    share, parts = cut(chunks, processors(device), lambda parts: blocks * parts, 8 * rows * length)
    partial = W.new_empty(parts, over(rows * length, 4) * 4)
    _products("product", PRODUCT_BYTES, device)(
        *(blocks * parts, 384, weights, back, table, *scales, partial),
        *(rows, row_tiles, tiles, length, states, share),
    )
    return add_parts(partial)[: rows * length].view(rows, length)


def adjoint(v: Tensor, log_lambda: Tensor) -> Tensor:
    """`M_n = sum_k v_k lambda_n^k`: v [rows, L], log_lambda [N, 2] -> pairs [rows, N, 2]."""
    moments = v.new_empty(v.shape[0], *log_lambda.shape)
    _moments(v, log_lambda, None, moments, moments)
    return moments


def gradients(dK: Tensor, W: Tensor, log_lambda: Tensor) -> tuple[Tensor, Tensor]:
    """Of the product: dW and d log_lambda, float64."""
    dW, d_log_lambda = W.new_empty(W.shape), log_lambda.new_empty(log_lambda.shape)
    _moments(dK, log_lambda, aligned(W), dW, d_log_lambda)
    return dW, d_log_lambda


def _moments(
    v: Tensor, log_lambda: Tensor, W: Tensor | None, result: Tensor, d_log: Tensor
) -> None:
    """The moments of v into result; given W, their conjugates, and d_log from those of k v."""
    (rows, length), states, device = v.shape, log_lambda.shape[0], v.device
    v, log_lambda, slope = aligned(v), aligned(log_lambda), int(W is not None)
    height, steps = (1 + slope) * rows, over(length, STEP)

    def blocks(pieces: int) -> int:
        return over(states, WIDTH) * over(height * pieces, ROWS)

    share, pieces = cut(steps, processors(device), blocks, 16 * height * states, STEPS)
    values, back, shift = arranged(v, 1, pieces, share, slope)
    partial = v.new_empty(height * pieces, states, 2)
    _products("moments", MOMENTS_BYTES, device)(
        *(over(states, WIDTH) * values.shape[0], 384, values, log_lambda, partial),
        *(height * pieces, states, share),
    )
    _ends("finish", device)(
        *(over(states, 8), 512, partial, back, log_lambda, v if W is None else W, result, d_log),
        *(rows, states, pieces, share * STEP, shift, slope),
    )


def arranged(
    v: Tensor, channels: int, pieces: int, steps: int, slope: int
) -> tuple[Tensor, Tensor, int]:
    """The rows of v, and of k v / 2^shift, scaled and in halves, and what undoes the scale.

    A tile of 64 rows holds pieces of so many steps of the rows of v; with several channels, v is
    [rows / channels, channels] rows, and each channel has a tile.
    """
    (rows, length), device = v.shape, v.device
    v, segments, shift = aligned(v), over(length, SEGMENT), (length - 1).bit_length()
    found, back = v.new_empty(rows, segments), v.new_empty(rows)
    _ends("largest", device)(rows * segments, 256, v, found, length, segments)
    tiles = channels if channels > 1 else over((1 + slope) * rows * pieces, ROWS)
    values = v.new_empty(tiles, steps, 2, STEP // 8, ROWS, 8, dtype=torch.float16)
    lines, eights = (rows, over(pieces, 8)) if channels > 1 else (over(rows, 8), pieces)
    blocks = lines * over(eights * steps * STEP, 1024)
    _ends("values", device)(
        *(blocks, 256, v, found, values, back),
        *(rows, channels, length, segments, pieces, steps, shift, slope),
    )
    return values, back, shift


def add_parts(partial: Tensor) -> Tensor:
    """The sum over the first dimension; the second is a multiple of 4."""
    if partial.shape[0] == 1:
        return partial[0]
    (parts, entries), total = partial.shape, torch.empty_like(partial[0])
    _ends("add", partial.device)(over(entries // 4, 256), 256, partial, total, entries // 4, parts)
    return total


def cut(
    steps: int,
    processors: int,
    blocks: Callable[[int], int],
    bytes_a_part: int,
    longest: int = 2**30,
) -> tuple[int, int]:
    """How a sum of so many steps is cut, steps a part and parts: few waves, little to add."""
    start = 4  # steps that a block's beginning and end take

    def cost(parts: int) -> float:
        waves = over(blocks(parts), processors)
        return waves * (over(steps, parts) + start) + parts * bytes_a_part / BYTES_A_STEP

    fewest = min(over(steps, longest), PIECES)
    share = over(steps, min(range(fewest, min(PIECES, steps) + 1), key=cost))
    return share, over(steps, share)


def processors(device: torch.device) -> int:
    """How many multiprocessors there are."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def aligned(x: Tensor) -> Tensor:
    """Contiguous, from a multiple of 16 bytes on."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def over(size: int, tile: int) -> int:
    """How many tiles cover it."""
    return -(-size // tile)


def products() -> int:
    """Of fp16 halves, for one product of fp32 numbers."""
    return 1 if torch.backends.cuda.matmul.fp32_precision == "tf32" else 3


def _products(name: str, shared_bytes: int, device: torch.device) -> nvrtc.Kernel:
    return kernel("vandermonde.cu", name, shared_bytes, device, products())


def _ends(name: str, device: torch.device) -> nvrtc.Kernel:
    return kernel("vandermonde_ends.cu", name, 0, device, 3)


@cache
def kernel(
    file: str, name: str, shared_bytes: int, device: torch.device, products: int
) -> nvrtc.Kernel:
    """Of one of the files that build on moments.cuh."""
    files = "device.cuh", "tensor_cores.cuh", "moments.cuh", file
    defines = ("STORAGE_BITS", 32), ("PRODUCTS", products)
    return nvrtc.load(files, name, defines, shared_bytes, device.index)
