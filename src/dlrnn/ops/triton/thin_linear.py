"""Linear maps between a few numbers and many channels, with backward: x is read once.

    spread   [P, T] to [P, H]   out = thin matrix + bias
    gather   [P, H] to [P, T]   out = wide matrix^T + bias
    outer    [P, T], [P, H]     thin^T wide, and the sums of both

with T at most 16. cuBLAS and PyTorch take five times as long for these as the bytes do. The last
runs on tensor cores, a number being two of 11 bits (tf32x3, as exact as fp32 for short sums).
"""
# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from dlrnn.ops.triton.partial_sums import multiprocessors, sum_rows

THIN = 16  # numbers at most
CHANNELS = range(32, 513)
TILE = 2048  # channels that a program of `spread` or `gather` has
ROWS = 32  # positions that one of `outer` takes at a time
PROGRAMS = 4  # of `outer`, a multiprocessor


def supports(x: Tensor, weight: Tensor) -> bool:
    """fp32 on a GPU, a few numbers on one side and many on the other."""
    thin, wide = sorted(weight.shape)
    fits = thin <= THIN and wide in CHANNELS and x.numel() > 0 and weight.numel() > 0
    return fits and x.is_cuda and x.dtype == torch.float32


def spread(thin: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    """[P, T] to [P, H] by a matrix [T, H]."""
    rows, channels = thin.shape[0], matrix.shape[1]
    out = thin.new_empty(rows, channels)
    width = triton.next_power_of_2(channels)
    height = max(1, TILE // width)
    _spread[(triton.cdiv(rows, height),)](
        *(thin.contiguous(), matrix, out if bias is None else bias, out, rows, *matrix.stride()),
        *(matrix.shape[0], channels, bias is not None, height, width),
        num_warps=4,
    )
    return out


def gather(wide: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    """[P, H] to [P, T] by a matrix [T, H]."""
    rows, count = wide.shape[0], matrix.shape[0]
    out = wide.new_empty(rows, count)
    width = triton.next_power_of_2(wide.shape[1])
    height = max(1, TILE // width)
    _gather[(triton.cdiv(rows, height),)](
        *(wide.contiguous(), matrix, out if bias is None else bias, out, rows, *matrix.stride()),
        *(count, wide.shape[1], bias is not None, triton.next_power_of_2(count), height, width),
        num_warps=4,
    )
    return out


def outer(thin: Tensor, wide: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`thin^T wide` [T, H], the sum of thin [T] and that of wide [H], over all positions."""
    (rows, count), channels = thin.shape, wide.shape[1]
    tiles = triton.cdiv(rows, ROWS)
    programs = min(tiles, PROGRAMS * multiprocessors(thin.device))
    partial = thin.new_empty(programs, (count + 1) * channels + count)
    _outer[(programs,)](
        *(thin.contiguous(), wide.contiguous(), partial, rows, tiles, 1.0, count, channels),
        *(max(16, triton.next_power_of_2(count + 1)), ROWS, triton.next_power_of_2(channels)),
        num_warps=4,
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
        y = tl.where((t == COUNT)[None, :], 1.0, y)  # whose products are the sums of x
        # Tensor cores cut sums off: they add up one tile, `one` keeps the compiler from more
        products += tl.dot(tl.trans(y), x, input_precision="tf32x3") * one
    to = partial + tl.program_id(0) * ((COUNT + 1) * CHANNELS + COUNT)
    known = (t <= COUNT)[:, None] & (h < CHANNELS)[None, :]
    tl.store(to + t[:, None] * CHANNELS + h[None, :], products, mask=known)
    tl.store(to + (COUNT + 1) * CHANNELS + t, tl.sum(thin_sum, 0), mask=t < COUNT)
