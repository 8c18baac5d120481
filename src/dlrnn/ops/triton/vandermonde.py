"""The Vandermonde product `K = Re(W P)` and its adjoint `M = v P^T` on tensor cores.

`P_nk = lambda_n^k` is never in memory. A position is split as `k = a + 128 b`: both are products
with the table `lambda^a`, a < 128, and scaled with `lambda^(128 b)`,

    K[a + 128 b] = Re sum_n (W_n lambda_n^(128 b)) lambda_n^a ,
    M_n = sum_b lambda_n^(128 b) sum_a v[a + 128 b] lambda_n^a ,

where `lambda^(128 b)` is itself a product of two table entries. Tables are made in float64.
Products of fp32 numbers are formed as three products of fp16 numbers, `x = high + low`:

    x y ~ high high + high low + low high        (relative error 2^-22, sums in fp32).

So that nothing leaves fp16's range, a row of W or v is scaled by a power of two to 2^13 at most,
and the table to 2^14; hence |lambda| <= 1 is asked for: larger powers become infinite.

The meaning is that of `ops.vandermonde`'s own functions. Nothing is added atomically: a sum over
several programs is a sum over a dimension of partial results.
"""
# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 128  # positions of a block b
LEAP = 32  # blocks between two entries of the coarse table
CHUNK = 32  # states that are summed at a time
UNIT = 2.0**14  # what stands for 1 in the table of `lambda^a`


def supports(values: Tensor, log_lambda: Tensor) -> bool:
    """fp32 values on a Hopper GPU or later."""
    return (
        values.is_cuda
        and values.dtype == torch.float32
        and min(values.numel(), log_lambda.numel()) > 0
        and torch.cuda.get_device_capability(values.device) >= (9, 0)
    )


def vandermonde(W: Tensor, log_lambda: Tensor, length: int) -> Tensor:
    """`K_k = Re(sum_n W_n lambda_n^k)`: W [rows, N, 2], log_lambda [N, 2] -> [rows, length]."""
    rows, states, _ = W.shape
    fine, middle, coarse = _tables(log_lambda, length)
    height = min(128, triton.next_power_of_2(rows))
    blocks = 128 // height  # so many blocks b fill a tile of 128 x 128
    tiles = triton.cdiv(rows, height), triton.cdiv(length, BLOCK * blocks)
    share, parts = _shares(tiles[0] * tiles[1], triton.cdiv(states, CHUNK), W.device)
    partial = W.new_empty(parts, rows, length)
    _product[(*tiles, parts)](
        *(W.contiguous(), _scales(W.flatten(1)), fine, middle, coarse, partial),
        *(rows, states, length, UNIT, share, height, blocks, BLOCK, LEAP, CHUNK),
        num_warps=8,
        num_stages=2,
    )
    return partial[0] if parts == 1 else partial.sum(0)


def adjoint(v: Tensor, log_lambda: Tensor) -> Tensor:
    """`M_n = sum_k v_k lambda_n^k`: v [rows, L], log_lambda [N, 2] -> pairs [rows, N, 2]."""
    (rows, length), states = v.shape, log_lambda.shape[0]
    fine, middle, coarse = _tables(log_lambda, length)
    blocks = triton.cdiv(length, BLOCK)
    halves, scales = v.new_empty(2, rows, blocks * BLOCK, dtype=torch.float16), _scales(v)
    _split[(rows, triton.cdiv(blocks * BLOCK, 1024))](v.contiguous(), scales, halves, length, 1024)
    height = min(128, max(64, triton.next_power_of_2(rows)))
    width = 64
    tiles = triton.cdiv(rows, height), triton.cdiv(states, width)
    share, parts = _shares(tiles[0] * tiles[1], blocks, v.device)
    partial = v.new_empty(parts, rows, states, 2)
    _moments[(*tiles, parts)](
        *(halves, scales, fine, middle, coarse, partial, rows, states, blocks, UNIT),
        *(share, height, width, BLOCK, LEAP),
        num_warps=8,
        num_stages=2,
    )
    return partial[0] if parts == 1 else partial.sum(0)


def _scales(x: Tensor) -> Tensor:
    """For each row the power of two that brings its largest entry to at most 2^13."""
    largest = x.abs().amax(1).clamp(min=2.0**-100)
    return torch.exp2(13 - largest.log2().ceil())


def _shares(tiles: int, chunks: int, device: torch.device) -> tuple[int, int]:
    """How a sum of `chunks` is cut so that every multiprocessor has a tile: chunks a part, parts.

    A share is rounded up to 4 binary digits: kernels are compiled for each.
    """
    multiprocessors = 1
    if device.type == "cuda":
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    share = triton.cdiv(chunks, max(1, min(multiprocessors // tiles, chunks // 4)))
    unit = 2 ** max(0, share.bit_length() - 4)
    share = unit * triton.cdiv(share, unit)
    return share, triton.cdiv(chunks, share)


# ---------------------------------------------------------------------------------- products


@triton.jit
@no_type_check
def _halves(x):
    """`x = high + low` in 16 bits each."""
    high = x.to(tl.float16)
    return high, (x - high.to(tl.float32)).to(tl.float16)


@triton.jit
@no_type_check
def _multiply(a_high, a_low, b_high, b_low, total):
    """`total + a b`."""
    total = tl.dot(a_low, b_high, total)
    total = tl.dot(a_high, b_low, total)
    return tl.dot(a_high, b_high, total)


@triton.jit
@no_type_check
def _pairs(table, row, states, n, mask, CHUNK: tl.constexpr):  # noqa: PLR0917
    """Rows of a table of pairs [., N, 2], CHUNK states from n on: real and imaginary parts."""
    i = tl.arange(0, 2 * CHUNK)
    at = table + row.to(tl.int64)[:, None] * (2 * states) + (2 * n + i)[None, :]
    both = tl.load(at, mask=mask[:, None] & (2 * n + i < 2 * states)[None, :], other=0.0)
    return tl.split(tl.reshape(both, (row.shape[0], CHUNK, 2)))


@triton.jit
@no_type_check
def _product(  # noqa: PLR0917
    W, scales, fine, middle, coarse, partial, rows, states, length, unit,
    SHARE: tl.constexpr, HEIGHT: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
    LEAP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One part of the sum over n, for HEIGHT rows of W and BLOCKS blocks of positions."""
    row = tl.program_id(0) * HEIGHT + tl.arange(0, HEIGHT)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    a = tl.arange(0, BLOCK)
    scale = tl.load(scales + row, mask=row < rows, other=1.0)[:, None]
    total = tl.zeros((BLOCKS * HEIGHT, BLOCK), dtype=tl.float32)
    for chunk in range(SHARE):
        n = (tl.program_id(2) * SHARE + chunk) * CHUNK
        w_re, w_im = _pairs(W, row, states, n, row < rows, CHUNK)
        w_re, w_im = w_re * scale, w_im * scale
        inside = block * BLOCK < length
        m_re, m_im = _pairs(middle, block % LEAP, states, n, inside, CHUNK)
        c_re, c_im = _pairs(coarse, block // LEAP, states, n, inside, CHUNK)
        s_re = (m_re * c_re - m_im * c_im)[:, None, :]
        s_im = (m_re * c_im + m_im * c_re)[:, None, :]
        re = w_re[None] * s_re - w_im[None] * s_im
        im = w_re[None] * s_im + w_im[None] * s_re
        scaled = tl.reshape(tl.join(re, -im), (BLOCKS * HEIGHT, 2 * CHUNK))
        high, low = _halves(scaled)
        i = 2 * n + tl.arange(0, 2 * CHUNK)
        table = fine + i[:, None] * BLOCK + a[None, :]
        known = (i < 2 * states)[:, None]
        f_high = tl.load(table, mask=known, other=0.0)
        f_low = tl.load(table + 2 * states * BLOCK, mask=known, other=0.0)
        total = _multiply(high, low, f_high, f_low, total)
    line = tl.arange(0, BLOCKS * HEIGHT)
    row = tl.program_id(0) * HEIGHT + line % HEIGHT
    k = ((tl.program_id(1) * BLOCKS + line // HEIGHT) * BLOCK)[:, None] + a[None, :]
    at = partial + (tl.program_id(2).to(tl.int64) * rows + row)[:, None] * length + k
    total *= (1.0 / (tl.load(scales + row, mask=row < rows, other=1.0) * unit))[:, None]
    tl.store(at, total, mask=(row < rows)[:, None] & (k < length))


@triton.jit
@no_type_check
def _moments(  # noqa: PLR0917
    halves, scales, fine, middle, coarse, partial, rows, states, blocks, unit,
    SHARE: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    LEAP: tl.constexpr,
):  # fmt: skip
    """One part of the sum over b, for HEIGHT rows of v and WIDTH states."""
    row = tl.program_id(0) * HEIGHT + tl.arange(0, HEIGHT)
    n = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    a = tl.arange(0, BLOCK)
    known, there = (n < states)[None, :], (row < rows)[:, None]
    table = fine + n[None, :] * (2 * BLOCK) + a[:, None]
    low = 2 * states * BLOCK
    re_high = tl.load(table, mask=known, other=0.0)
    re_low = tl.load(table + low, mask=known, other=0.0)
    im_high = tl.load(table + BLOCK, mask=known, other=0.0)
    im_low = tl.load(table + low + BLOCK, mask=known, other=0.0)
    total_re = tl.zeros((HEIGHT, WIDTH), dtype=tl.float32)
    total_im = tl.zeros((HEIGHT, WIDTH), dtype=tl.float32)
    zero = tl.zeros((HEIGHT, WIDTH), dtype=tl.float32)
    stride = blocks * BLOCK
    row_high, row_low = row.to(tl.int64)[:, None], (row + rows).to(tl.int64)[:, None]
    for step in range(SHARE):
        b = tl.program_id(2) * SHARE + step
        inside = b < blocks
        at = halves + (b * BLOCK + a)[None, :]
        v_high = tl.load(at + row_high * stride, mask=there & inside, other=0.0)
        v_low = tl.load(at + row_low * stride, mask=there & inside, other=0.0)
        re = _multiply(v_high, v_low, re_high, re_low, zero)
        im = _multiply(v_high, v_low, im_high, im_low, zero)
        m = middle + 2 * ((b % LEAP) * states + n)
        c = coarse + 2 * ((b // LEAP).to(tl.int64) * states + n)
        mask = (n < states) & inside
        m_re, m_im = tl.load(m, mask=mask, other=0.0), tl.load(m + 1, mask=mask, other=0.0)
        c_re, c_im = tl.load(c, mask=mask, other=0.0), tl.load(c + 1, mask=mask, other=0.0)
        s_re, s_im = (m_re * c_re - m_im * c_im)[None, :], (m_re * c_im + m_im * c_re)[None, :]
        total_re += re * s_re - im * s_im
        total_im += re * s_im + im * s_re
    part = tl.program_id(2).to(tl.int64) * rows + row
    to = partial + 2 * (part[:, None] * states + n[None, :])
    back = (1.0 / (tl.load(scales + row, mask=row < rows, other=1.0) * unit))[:, None]
    _store_pair(to, total_re * back, total_im * back, there & known)


@triton.jit
@no_type_check
def _split(v, scales, halves, length, WIDTH: tl.constexpr):
    """The high and low parts of the scaled v [rows, L], filled up with zeros."""
    k = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    row, stride = tl.program_id(0).to(tl.int64), tl.cdiv(length, 128) * 128
    x = tl.load(v + row * length + k, mask=k < length, other=0.0)
    high, low = _halves(x * tl.load(scales + row))
    to = halves + row * stride + k
    tl.store(to, high, mask=k < stride)
    tl.store(to + tl.num_programs(0).to(tl.int64) * stride, low, mask=k < stride)


# ---------------------------------------------------------------------------------- tables


def _tables(log_lambda: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """`2^14 lambda^a`, a < 128, in fp16, [high or low, N, re or im, 128]; and as fp32 pairs
    `lambda^(128 j)`, j < 32, [32, N, 2], and `lambda^(4096 t)`, [L / 4096, N, 2].
    """
    states, leaps = log_lambda.shape[0], triton.cdiv(length, BLOCK * LEAP)
    fine = log_lambda.new_empty(2, states, 2, BLOCK, dtype=torch.float16)
    middle = log_lambda.new_empty(LEAP, states, 2, dtype=torch.float32)
    coarse = log_lambda.new_empty(leaps, states, 2, dtype=torch.float32)
    entries = BLOCK + LEAP + leaps
    _fill_tables[(triton.cdiv(states, 32), triton.cdiv(entries, 32))](
        *(log_lambda.contiguous(), fine, middle, coarse, states, entries, UNIT),
        *(32, BLOCK, LEAP),
        num_warps=4,
    )
    return fine, middle, coarse


@triton.jit
@no_type_check
def _fill_tables(  # noqa: PLR0917
    log_lambda, fine, middle, coarse, states, entries, unit,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, LEAP: tl.constexpr,
):  # fmt: skip
    """`exp(position log lambda)`, phases formed and reduced in float64."""
    n = (tl.program_id(0) * WIDTH + tl.arange(0, WIDTH))[:, None]
    entry = (tl.program_id(1) * WIDTH + tl.arange(0, WIDTH))[None, :]
    j, t = entry - BLOCK, entry - BLOCK - LEAP
    position = tl.where(entry < BLOCK, entry, tl.where(t < 0, j, t * LEAP) * BLOCK)
    known = n < states
    decay = tl.load(log_lambda + 2 * n, mask=known, other=0.0) * position
    phase = tl.load(log_lambda + 2 * n + 1, mask=known, other=0.0) * position
    modulus = tl.exp(decay)
    re, im = (modulus * tl.cos(phase)).to(tl.float32), (modulus * tl.sin(phase)).to(tl.float32)
    re_high, re_low = _halves(re * unit)
    im_high, im_low = _halves(im * unit)
    at, low, mask = fine + n * (2 * BLOCK) + entry, 2 * states * BLOCK, known & (entry < BLOCK)
    tl.store(at, re_high, mask=mask)
    tl.store(at + BLOCK, im_high, mask=mask)
    tl.store(at + low, re_low, mask=mask)
    tl.store(at + low + BLOCK, im_low, mask=mask)
    _store_pair(middle + 2 * (j * states + n), re, im, known & (j >= 0) & (t < 0))
    _store_pair(coarse + 2 * (t * states + n), re, im, known & (t >= 0) & (entry < entries))


@triton.jit
@no_type_check
def _store_pair(to, re, im, mask):
    tl.store(to, re, mask=mask)
    tl.store(to + 1, im, mask=mask)
