"""Activation and linear map of the channels behind a convolution, with backward, on tensor cores.

    out = act(y) weight^T + bias ,   dy = (dout weight) act'(y) ,
    d_weight = dout^T act(y) ,       d_bias = sum dout .

One kernel each way: y is read once, act(y) is computed where it is needed and never stored. A
program takes tile after tile of positions, with all channels; y and dy lie in rows [B, H, .] or
channel-last, out and dout are [B, L, .]. What a program adds to the gradients of weight and bias is
a row of partial sums: nothing is added atomically.

Products of fp32 numbers are formed as three products of fp16 numbers, `x = high + low`:

    x y ~ high high + high low + low high        (relative error 2^-22, sums in fp32).

Each position is brought into fp16's range by a power of two. An infinity makes its position NaN.
"""
# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from functools import cache
from typing import NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from dlrnn.ops.triton.halves import _halves, _multiply

WIDTH = 128  # columns that are done at a time


def supports(y: Tensor) -> bool:
    """fp32 on a Hopper GPU or later; channels are multiples of 16, at most 256."""
    return (
        y.is_cuda
        and y.dtype == torch.float32
        and y.numel() > 0
        and torch.cuda.get_device_capability(y.device) >= (9, 0)
    )


def forward(
    y: Tensor, length: int, weight: Tensor, bias: Tensor, activation: str, *, in_rows: bool
) -> Tensor:
    """From y, [B, H, .] in rows or [B, L, H], to out [B, L, columns]."""
    columns, channels = weight.shape
    out = y.new_empty(y.shape[0], length, columns)
    for part in _parts(columns):
        plan = FORWARD[_size(channels, len(part))]
        tiles = y.shape[0] * triton.cdiv(length, plan.positions)
        _forward[(min(tiles, plan.programs * _multiprocessors(y.device)),)](
            *(y, *_halves_of(weight[part.start : part.stop]), bias[part.start :]),
            *(out[..., part.start :], length, tiles, columns, *_strides(y, in_rows)),
            *(channels, len(part), activation == "gelu", plan.positions),
            *(triton.next_power_of_2(channels), triton.next_power_of_2(len(part))),
            num_warps=plan.warps,
            num_stages=plan.stages,
        )
    return out


def backward(
    dout: Tensor, y: Tensor, weight: Tensor, activation: str, *, in_rows: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """dy, laid out as y; d_weight; d_bias."""
    columns, channels = weight.shape
    dout, dy = dout.contiguous(), torch.empty_like(y)
    d_weight, d_bias = weight.new_empty(weight.shape), weight.new_empty(columns)
    for part in _parts(columns):
        plan = BACKWARD[min(WIDTH, _size(channels, len(part)))]
        height = min(16 * plan.warps, triton.next_power_of_2(channels))
        tiles = y.shape[0] * triton.cdiv(dout.shape[1], plan.positions)
        programs = min(tiles, plan.programs * _multiprocessors(y.device))
        weights = len(part) * channels
        partial = y.new_empty(programs, weights + len(part))
        _backward[(programs, triton.cdiv(channels, height))](
            *(dout[..., part.start :], y, *_halves_of(weight[part.start : part.stop]), dy, partial),
            *(dout.shape[1], tiles, columns, *_strides(y, in_rows)),
            *(channels, len(part), activation == "gelu", part.start > 0, plan.positions),
            *(height, triton.next_power_of_2(len(part))),
            num_warps=plan.warps,
            num_stages=plan.stages,
        )
        _sum_partial[(triton.cdiv(weights + len(part), 32),)](
            *(partial, d_weight[part.start :], d_bias[part.start :]),
            *(programs, weights, len(part), 64, 32),
        )
    return dy, d_weight, d_bias


def _parts(columns: int) -> list[range]:
    """Columns that are done at a time."""
    return [range(first, min(first + WIDTH, columns)) for first in range(0, columns, WIDTH)]


class Plan(NamedTuple):
    """Positions of a tile; warps and stages of a program; programs a multiprocessor."""

    positions: int
    warps: int
    stages: int
    programs: int


FORWARD = {
    32: Plan(64, 4, 3, 8),
    64: Plan(64, 4, 3, 3),
    128: Plan(64, 8, 3, 1),
    256: Plan(32, 8, 1, 1),
}
BACKWARD = {32: Plan(32, 2, 1, 12), 64: Plan(32, 4, 3, 2), 128: Plan(32, 4, 3, 1)}
"""By the largest number of channels. Backward, a warp has 16 channels, and of 128 a program has 64:
two programs fit into a multiprocessor, and one computes while the other waits.
"""


def _size(channels: int, columns: int) -> int:
    size: int = triton.next_power_of_2(max(32, channels, columns))
    return size


def _halves_of(weight: Tensor) -> tuple[Tensor, Tensor]:
    """High and low parts of the scaled weight, and the inverse of its scale."""
    halves = weight.new_empty(2, *weight.shape, dtype=torch.float16)
    back = weight.new_empty(1)
    size = weight.numel()
    _split_weight[(1,)](
        weight.contiguous(), halves, back, size, triton.next_power_of_2(size), num_warps=8
    )
    return halves, back


def _strides(y: Tensor, in_rows: bool) -> tuple[int, int, int]:
    """Of sequences, channels and positions."""
    sequences, first, second = y.stride()
    return (sequences, first, second) if in_rows else (sequences, second, first)


@cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


@triton.jit
@no_type_check
def _scale(largest):
    """The power of two that brings `largest` into [2^13, 2^14), and its inverse, which is NaN if
    that is not finite.
    """
    exponent = tl.maximum(largest, 2.0**-100).to(tl.int32, bitcast=True) >> 23
    scale = ((267 - exponent) << 23).to(tl.float32, bitcast=True)
    back = ((exponent - 13) << 23).to(tl.float32, bitcast=True)
    return scale, tl.where(exponent < 255, back, float("nan"))


@triton.jit
@no_type_check
def _largest_of_rows(x):
    """`max |x|` of each row; four neighbours, which a thread has, then as integers, which a warp
    compares in one instruction.
    """
    x = tl.max(tl.reshape(tl.abs(x), (x.shape[0], x.shape[1] // 4, 4)), 2)
    return tl.max(x.to(tl.int32, bitcast=True), 1).to(tl.float32, bitcast=True)


@triton.jit
@no_type_check
def _normal(x):
    """`share = P(X < x)` and `bell = exp(-x^2 / 2)` of a normal X: `gelu(x) = x share`.

    `P(X < -|x|) = bell r(|x|)`, r a polynomial: the share is right to 2e-8 and its rounding, as
    that of `erf`, whose two polynomials cost twice as much.
    """
    a = tl.minimum(tl.abs(x), 10.0)
    bell = tl.exp2(x * x * -0.7213475204444817)
    r = 7.70877446e-06 - 3.15542834e-07 * a
    r = -8.47709546e-05 + r * a
    r = 0.000563652553 + r * a
    r = -0.00259008986 + r * a
    r = 0.00900384657 + r * a
    r = -0.0254718163 + r * a
    r = 0.0619239312 + r * a
    r = -0.132805786 + r * a
    r = 0.249972573 + r * a
    r = -0.398940602 + r * a
    tail = bell * (0.499999983 + r * a)
    return tl.where(x < 0.0, tail, 1.0 - tail), bell


@triton.jit
@no_type_check
def _split_weight(weight, halves, back, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """High and low parts of the scaled weight; one program."""
    i = tl.arange(0, BLOCK)
    w = tl.load(weight + i, mask=i < SIZE, other=0.0)
    w_scale, w_back = _scale(tl.max(tl.abs(w), 0))
    high, low = _halves(w * w_scale)
    tl.store(halves + i, high, mask=i < SIZE)
    tl.store(halves + SIZE + i, low, mask=i < SIZE)
    tl.store(back, w_back)


@triton.jit(do_not_specialize=["tiles"])
@no_type_check
def _forward(  # noqa: PLR0917
    y, halves, w_backs, bias, out, length, tiles, out_stride,
    sequence_stride, channel_stride, position_stride,
    CHANNELS: tl.constexpr, COLUMNS: tl.constexpr, GELU: tl.constexpr, POSITIONS: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    h, o, p = tl.arange(0, HEIGHT), tl.arange(0, WIDTH), tl.arange(0, POSITIONS)
    known = (o < COLUMNS)[:, None] & (h < CHANNELS)[None, :]
    table = halves + o[:, None] * CHANNELS + h[None, :]
    w_high = tl.load(table, mask=known, other=0.0)
    w_low = tl.load(table + COLUMNS * CHANNELS, mask=known, other=0.0)
    w_back = tl.load(w_backs)
    b = tl.load(bias + o, mask=o < COLUMNS, other=0.0)[:, None]
    tiles_each = tl.cdiv(length, POSITIONS)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        sequence = (tile // tiles_each).to(tl.int64)
        k = tile % tiles_each * POSITIONS + p
        at = y + sequence * sequence_stride
        at += h[:, None] * channel_stride + k[None, :] * position_stride
        z = tl.load(at, mask=(h < CHANNELS)[:, None] & (k < length)[None, :], other=0.0)
        if GELU:
            z *= _normal(z)[0]
        scale, back = _scale(tl.max(tl.abs(z), 0))
        high, low = _halves(z * scale[None, :])
        total = tl.zeros((WIDTH, POSITIONS), dtype=tl.float32)
        total = _multiply(w_high, w_low, high, low, total)
        to = out + sequence * length * out_stride
        to += k[None, :] * out_stride + o[:, None]
        inside = (o < COLUMNS)[:, None] & (k < length)[None, :]
        tl.store(to, total * w_back * back[None, :] + b, mask=inside)


@triton.jit(do_not_specialize=["tiles"])
@no_type_check
def _backward(  # noqa: PLR0917
    dout, y, halves, w_backs, dy, partial, length, tiles, out_stride,
    sequence_stride, channel_stride, position_stride,
    CHANNELS: tl.constexpr, COLUMNS: tl.constexpr, GELU: tl.constexpr, ADD: tl.constexpr,
    POSITIONS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(1) * HEIGHT + tl.arange(0, HEIGHT)
    o, p = tl.arange(0, WIDTH), tl.arange(0, POSITIONS)
    known = (h < CHANNELS)[:, None] & (o < COLUMNS)[None, :]
    table = halves + o[None, :] * CHANNELS + h[:, None]
    w_high = tl.load(table, mask=known, other=0.0)
    w_low = tl.load(table + COLUMNS * CHANNELS, mask=known, other=0.0)
    w_back = tl.load(w_backs)
    d_weight = tl.zeros((HEIGHT, WIDTH), dtype=tl.float32)
    d_bias = tl.zeros((4, WIDTH), dtype=tl.float32)
    tiles_each = tl.cdiv(length, POSITIONS)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        sequence = (tile // tiles_each).to(tl.int64)
        k = tile % tiles_each * POSITIONS + p
        at = dout + sequence * length * out_stride
        at += k[:, None] * out_stride + o[None, :]
        d = tl.load(at, mask=(k < length)[:, None] & (o < COLUMNS)[None, :], other=0.0)
        first = sequence * sequence_stride
        at = h[:, None] * channel_stride + k[None, :] * position_stride
        inside = (h < CHANNELS)[:, None] & (k < length)[None, :]
        z = tl.load(y + first + at, mask=inside, other=0.0)
        d_bias += tl.sum(tl.reshape(d, (POSITIONS // 4, 4, WIDTH)), 0)
        d_scale, d_back = _scale(_largest_of_rows(d))
        d_high, d_low = _halves(d * d_scale[:, None])
        dz = tl.zeros((HEIGHT, POSITIONS), dtype=tl.float32)
        dz = _multiply(w_high, w_low, tl.trans(d_high), tl.trans(d_low), dz)
        dz *= w_back * d_back[None, :]
        # z where dz is NaN or not: so it lives in dz's registers, and nothing is computed twice
        z = tl.where(dz == dz, z, dz)  # noqa: PLR0124
        if GELU:
            share, bell = _normal(z)
            dz *= share + 0.3989422804014327 * z * bell
            z *= share
        if ADD:  # other columns were done before
            dz += tl.load(dy + first + at, mask=inside, other=0.0)
        tl.store(dy + first + at, dz, mask=inside)
        z *= d_back[None, :]  # as the sum over positions weighs it
        scale, back = _scale(tl.max(tl.abs(z)))
        high, low = _halves(z * scale)
        more = tl.zeros((HEIGHT, WIDTH), dtype=tl.float32)
        more = _multiply(high, low, d_high, d_low, more)
        d_weight += more * back
    to = partial + tl.program_id(0) * COLUMNS * (CHANNELS + 1)
    tl.store(to + o[None, :] * CHANNELS + h[:, None], d_weight, mask=known)
    mine = (o < COLUMNS) & (tl.program_id(1) == 0)
    tl.store(to + COLUMNS * CHANNELS + o, tl.sum(d_bias, 0), mask=mine)


@triton.jit(do_not_specialize=["programs"])
@no_type_check
def _sum_partial(  # noqa: PLR0917
    partial, d_weight, d_bias, programs, weights, columns, ROWS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """The gradients are the sums of all programs' rows."""
    i = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    at = partial + i[None, :]
    total = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
    for first in range(0, programs, ROWS):
        row = (first + tl.arange(0, ROWS))[:, None]
        known = (row < programs) & (i < weights + columns)[None, :]
        total += tl.load(at + row * (weights + columns), mask=known, other=0.0)
    sums = tl.sum(total, 0)
    tl.store(d_weight + i, sums, mask=i < weights)
    tl.store(d_bias + i - weights, sums, mask=(i >= weights) & (i < weights + columns))
