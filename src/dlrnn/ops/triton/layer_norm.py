"""LayerNorm of a sum, forward and backward: each tensor is read once and written once.

A program handles whole positions, which are independent of each other. Mean and standard deviation
are not saved: backward computes them again from the row that it reads anyway. PyTorch's own kernels
take 0.42 ms at [65536, 128] on an H200, forward and backward, most of it for the gradients of
weight and bias.
"""
# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from dlrnn.common.device import multiprocessors, on_its_device
from dlrnn.ops.triton.partial_sums import sum_rows

LARGEST = 1024  # channels
TILE = 2048  # numbers, for 4 warps
PROGRAMS = 4  # of a multiprocessor, backward


def supports(x: Tensor) -> bool:
    """fp32 on a GPU, not empty, at most 1024 channels."""
    return x.is_cuda and x.dtype == torch.float32 and 0 < x.shape[-1] <= LARGEST and x.numel() > 0


@on_its_device
def forward(
    x: Tensor, added: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The LayerNorm of `x + added`, and that sum (x itself without `added`)."""
    x, adds = x.contiguous(), added is not None
    added = x if added is None else added.contiguous()
    weight, bias, (height, width, rows) = weight.contiguous(), bias.contiguous(), _sizes(x)
    out, total = torch.empty_like(x), torch.empty_like(x) if adds else x
    _forward[(triton.cdiv(rows, height),)](
        *(x, added, weight, bias, out, total, rows, eps),
        *(x.shape[-1], adds, height, width),
        num_warps=4,
    )
    return out, total


@on_its_device
def backward(dout: Tensor, total: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The gradients of the sum, and of weight and bias as [2, H]."""
    dout, total, weight = dout.contiguous(), total.contiguous(), weight.contiguous()
    channels, (height, width, rows) = total.shape[-1], _sizes(total)
    tiles, d_total = triton.cdiv(rows, height), torch.empty_like(total)
    programs = min(tiles, PROGRAMS * multiprocessors(total.device))
    partial = total.new_empty(programs, 2 * channels)
    _backward[(programs,)](
        *(dout, total, weight, d_total, partial, rows, tiles, eps, channels, height, width),
        num_warps=4,
    )
    return d_total, sum_rows(partial).view(2, channels)


def _sizes(x: Tensor) -> tuple[int, int, int]:
    """Height and width of a tile (a power of two), and the number of positions."""
    width = triton.next_power_of_2(x.shape[-1])
    return max(1, TILE // width), width, x.numel() // x.shape[-1]


@triton.jit
@no_type_check
def _centred(x, known, eps, CHANNELS: tl.constexpr):
    """`x - mean` and `1 / standard deviation` of each row."""
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
