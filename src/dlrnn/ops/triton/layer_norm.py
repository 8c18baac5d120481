"""LayerNorm of a sum, with backward: each tensor is read once and written once.

Positions are independent, so that a program has whole ones; mean and deviation are not kept,
backward has the row before it anyway. PyTorch's own kernels take 0.42 ms at [65536, 128] on an
H200, both ways, most of it for the gradients of weight and bias.
"""
# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from dlrnn.ops.triton.partial_sums import multiprocessors, sum_rows

LARGEST = 1024  # channels
TILE = 2048  # numbers
PROGRAMS = 6  # a multiprocessor


def supports(x: Tensor) -> bool:
    """fp32 on a GPU, at most 1024 channels, something to do."""
    return x.is_cuda and x.dtype == torch.float32 and 0 < x.shape[-1] <= LARGEST and x.numel() > 0


def forward(
    x: Tensor, added: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The norm of `x + added`, and that sum (x itself if there is nothing to add)."""
    x = x.contiguous()
    out, total = torch.empty_like(x), x if added is None else torch.empty_like(x)
    height, width, rows = _sizes(x)
    _forward[(triton.cdiv(rows, height),)](
        *(x, x if added is None else added.contiguous(), weight, bias, out, total, rows, eps),
        *(x.shape[-1], added is not None, height, width),
        num_warps=4,
    )
    return out, total


def backward(dout: Tensor, total: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The gradients of the sum, and of weight and bias, [2, H]."""
    dout, d_total = dout.contiguous(), torch.empty_like(total)
    height, width, rows = _sizes(total)
    channels, tiles = total.shape[-1], triton.cdiv(rows, height)
    programs = min(tiles, PROGRAMS * multiprocessors(total.device))
    partial = total.new_empty(programs, 2 * channels)
    _backward[(programs,)](
        *(dout, total, weight, d_total, partial, rows, tiles, eps, channels, height, width),
        num_warps=4,
    )
    return d_total, sum_rows(partial).view(2, channels)


def _sizes(x: Tensor) -> tuple[int, int, int]:
    """Positions and channels of a tile, and all positions."""
    width = triton.next_power_of_2(x.shape[-1])
    return max(1, TILE // width), width, x.numel() // x.shape[-1]


@triton.jit
@no_type_check
def _centred(x, known, eps, CHANNELS: tl.constexpr):
    """`x - mean` and `1 / deviation` of each row."""
    x -= (tl.sum(x, 1) / CHANNELS)[:, None]
    x = tl.where(known, x, 0.0)
    return x, (1.0 / tl.sqrt(tl.sum(x * x, 1) / CHANNELS + eps))[:, None]


@triton.jit
@no_type_check
def _forward(  # noqa: PLR0917
    x, added, weight, bias, out, total, rows, eps,
    CHANNELS: tl.constexpr, ADDS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * HEIGHT + tl.arange(0, HEIGHT)
    h = tl.arange(0, WIDTH)
    known = (row < rows)[:, None] & (h < CHANNELS)[None, :]
    at = row[:, None] * CHANNELS + h[None, :]
    v = tl.load(x + at, mask=known, other=0.0)
    if ADDS:
        v += tl.load(added + at, mask=known, other=0.0)
        tl.store(total + at, v, mask=known)
    v, inverse = _centred(v, known, eps, CHANNELS)
    w = tl.load(weight + h, mask=h < CHANNELS, other=0.0)[None, :]
    b = tl.load(bias + h, mask=h < CHANNELS, other=0.0)[None, :]
    tl.store(out + at, v * inverse * w + b, mask=known)


@triton.jit(do_not_specialize=["tiles"])
@no_type_check
def _backward(  # noqa: PLR0917
    dout, total, weight, d_total, partial, rows, tiles, eps,
    CHANNELS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    h = tl.arange(0, WIDTH)
    w = tl.load(weight + h, mask=h < CHANNELS, other=0.0)[None, :]
    d_weight = tl.zeros((HEIGHT, WIDTH), dtype=tl.float32)
    d_bias = tl.zeros((HEIGHT, WIDTH), dtype=tl.float32)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=3):
        row = (tile * HEIGHT + tl.arange(0, HEIGHT)).to(tl.int64)
        known = (row < rows)[:, None] & (h < CHANNELS)[None, :]
        at = row[:, None] * CHANNELS + h[None, :]
        d = tl.load(dout + at, mask=known, other=0.0)
        v = tl.load(total + at, mask=known, other=0.0)
        v, inverse = _centred(v, known, eps, CHANNELS)
        v *= inverse
        d_weight += d * v
        d_bias += d
        d *= w
        d -= (tl.sum(d, 1) / CHANNELS)[:, None] + v * (tl.sum(d * v, 1) / CHANNELS)[:, None]
        tl.store(d_total + at, d * inverse, mask=known)
    to = partial + tl.program_id(0) * 2 * CHANNELS + h
    tl.store(to, tl.sum(d_weight, 0), mask=h < CHANNELS)
    tl.store(to + CHANNELS, tl.sum(d_bias, 0), mask=h < CHANNELS)
