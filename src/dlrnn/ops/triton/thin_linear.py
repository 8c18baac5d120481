"""Linear maps between a few numbers and many channels, with backward; x is read once.

    spread   [P, T] to [P, H]   out = thin matrix + bias
    gather   [P, H] to [P, T]   out = wide matrix^T + bias
    outer    [P, T], [P, H]     thin^T wide, and the sums of both

with T at most 16. cuBLAS and PyTorch take five times as long as the memory traffic does. `outer`
runs on tensor cores with each number as two of 11 bits (tf32x3, as exact as fp32 for short sums).
"""
# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from typing import Any, no_type_check

import triton
import triton.language as tl
from torch import Tensor

from dlrnn.common.device import multiprocessors, on_its_device
from dlrnn.ops.triton.partial_sums import sum_rows

THIN = 16  # at most so many numbers T
CHANNELS = range(32, 513)
SPREAD = {128: (4096, 8), 256: (1024, 2), 512: (1024, 2)}  # by width: numbers of a tile, warps
GATHER = {128: (8192, 8), 256: (4096, 4), 512: (4096, 4)}
NARROW = 2048, 4  # below 128 channels
ROWS = 32  # positions of a tile of `outer`


def supports(x: Tensor, weight: Tensor) -> bool:
    """On a GPU, not empty, with few numbers on one side and many on the other."""
    thin, wide = sorted(weight.shape)
    fits = thin <= THIN and wide in CHANNELS and x.numel() > 0 and weight.numel() > 0
    return fits and x.is_cuda


@on_its_device
def spread(thin: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    """`thin matrix + bias`: [P, T] to [P, H] with a matrix [T, H]."""
    return _map(_spread, SPREAD, thin, matrix, bias, matrix.shape[1])


@on_its_device
def gather(wide: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    """`wide matrix^T + bias`: [P, H] to [P, T] with a matrix [T, H]."""
    count, depth = matrix.shape[0], triton.next_power_of_2(matrix.shape[0])
    return _map(_gather, GATHER, wide, matrix, bias, count, depth)


def _map(  # noqa: PLR0917
    kernel: Any,
    tiles: dict[int, tuple[int, int]],
    x: Tensor,
    matrix: Tensor,
    bias: Tensor | None,
    columns: int,
    *depth: int,
) -> Tensor:
    """Launch a kernel from x to [P, columns]."""
    x, (count, channels), rows = x.contiguous(), matrix.shape, x.shape[0]
    width = triton.next_power_of_2(channels)
    tile, warps = tiles.get(width, NARROW)
    height, out = max(1, tile // width), x.new_empty(rows, columns)
    kernel[(triton.cdiv(rows, height),)](
        *(x, matrix, out if bias is None else bias.contiguous(), out, rows),
        *matrix.stride(),
        *(count, channels, bias is not None, *depth, height, width),
        num_warps=warps,
    )
    return out


@on_its_device
def outer(thin: Tensor, wide: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`thin^T wide` [T, H], and the sums of thin [T] and of wide [H] over all positions."""
    thin, wide, (rows, count) = thin.contiguous(), wide.contiguous(), thin.shape
    channels = wide.shape[1]
    tiles, width = triton.cdiv(rows, ROWS), triton.next_power_of_2(channels)
    programs = min(tiles, 2 * multiprocessors(thin.device))
    partial = thin.new_empty(programs, (count + 1) * channels + count)
    _outer[(programs,)](
        *(thin, wide, partial, rows, tiles, 1.0, count, channels),
        *(max(16, triton.next_power_of_2(count + 1)), ROWS, width),
        num_warps=8 if width >= 256 else 4,
    )
    product, wide_sum, thin_sum = sum_rows(partial).split([count * channels, channels, count])
    return product.view(count, channels), thin_sum, wide_sum


@triton.jit
@no_type_check
def _spread(  # noqa: PLR0917
    thin, matrix, bias, out, rows, thin_stride, channel_stride,
    COUNT: tl.constexpr, CHANNELS: tl.constexpr, BIAS: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * HEIGHT + tl.arange(0, HEIGHT)
    h = tl.arange(0, WIDTH)
    total = tl.zeros((HEIGHT, WIDTH), dtype=tl.float32)
    if BIAS:
        total += tl.load(bias + h, mask=h < CHANNELS, other=0.0)[None, :]
    for t in tl.static_range(COUNT):
        m = tl.load(matrix + t * thin_stride + h * channel_stride, mask=h < CHANNELS, other=0.0)
        x = tl.load(thin + row * COUNT + t, mask=row < rows, other=0.0)
        total += x[:, None] * m[None, :]
    known = (row < rows)[:, None] & (h < CHANNELS)[None, :]
    tl.store(out + row[:, None] * CHANNELS + h[None, :], total, mask=known)


@triton.jit
@no_type_check
def _gather(  # noqa: PLR0917
    wide, matrix, bias, out, rows, thin_stride, channel_stride,
    COUNT: tl.constexpr, CHANNELS: tl.constexpr, BIAS: tl.constexpr, DEPTH: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * HEIGHT + tl.arange(0, HEIGHT)
    h = tl.arange(0, WIDTH)
    known = (row < rows)[:, None] & (h < CHANNELS)[None, :]
    x = tl.load(wide + row[:, None] * CHANNELS + h[None, :], mask=known, other=0.0)
    t, total = tl.arange(0, DEPTH), tl.zeros((HEIGHT, DEPTH), dtype=tl.float32)
    for k in tl.static_range(COUNT):
        m = tl.load(matrix + k * thin_stride + h * channel_stride, mask=h < CHANNELS, other=0.0)
        total = tl.where((t == k)[None, :], tl.sum(x * m[None, :], 1)[:, None], total)
    if BIAS:
        total += tl.load(bias + t, mask=t < COUNT, other=0.0)[None, :]
    known = (row < rows)[:, None] & (t < COUNT)[None, :]
    tl.store(out + row[:, None] * COUNT + t[None, :], total, mask=known)


@triton.jit(do_not_specialize=["tiles"])
@no_type_check
def _outer(  # noqa: PLR0917
    thin, wide, partial, rows, tiles, one,
    COUNT: tl.constexpr, CHANNELS: tl.constexpr,
    DEPTH: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    t, h = tl.arange(0, DEPTH), tl.arange(0, WIDTH)
    products = tl.zeros((DEPTH, WIDTH), dtype=tl.float32)
    thin_sum = tl.zeros((HEIGHT, DEPTH), dtype=tl.float32)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=3):
        row = (tile * HEIGHT + tl.arange(0, HEIGHT)).to(tl.int64)
        known = (row < rows)[:, None] & (h < CHANNELS)[None, :]
        x = tl.load(wide + row[:, None] * CHANNELS + h[None, :], mask=known, other=0.0)
        known = (row < rows)[:, None] & (t < COUNT)[None, :]
        y = tl.load(thin + row[:, None] * COUNT + t[None, :], mask=known, other=0.0)
        thin_sum += y
        y = tl.where((t == COUNT)[None, :], 1.0, y)  # its products are the sums of x
        # Tensor cores truncate their sums. They add up one tile: `one`, a 1 that the compiler does
        # not know, keeps it from merging the addition into their accumulator.
        products += tl.dot(tl.trans(y), x, input_precision="tf32x3") * one
    to = partial + tl.program_id(0) * ((COUNT + 1) * CHANNELS + COUNT)
    known = (t <= COUNT)[:, None] & (h < CHANNELS)[None, :]
    tl.store(to + t[:, None] * CHANNELS + h[None, :], products, mask=known)
    tl.store(to + (COUNT + 1) * CHANNELS + t, tl.sum(thin_sum, 0), mask=t < COUNT)
