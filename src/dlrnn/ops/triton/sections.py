"""The spectrum of S4's kernel (ops/dplr.py) and its gradients in float64, without large tables.

Forward, a thread has a frequency: it adds the sections of all states, then applies Woodbury's
formula. Backward, a first kernel does so again and stores the gradients of the sums for each
frequency; in a second kernel a thread has a state and adds over a chunk of frequencies. Chunks are
added in a fixed order. The work is a division for each state and frequency, and 24 (backward 72)
multiply-adds: 0.17 ms forward and 0.59 ms backward for 128 channels, 32 pairs, two outputs and
length 16000 on an H200.
"""
# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from dlrnn.common.device import on_its_device

FREQUENCIES = 128  # of a program that adds over states
STATES = 32  # of a program (one warp) that adds over frequencies
SHORTEST, CHUNKS = 128, 64  # a chunk has at least SHORTEST frequencies; at most CHUNKS chunks
ROOM = 2**25  # numbers that backward stores between its two kernels


@on_its_device
def spectrum(weights: Tensor, a: Tensor, b: Tensor, dt: Tensor, angles: Tensor) -> Tensor:
    """The spectrum [H, R, F, 2], R 1 or 2.

    Weights are [H, 4 R + 4, M], a and b [H, M], dt [H], angles (cosines and sines) [2, F].
    """
    channels, sums, states = weights.shape
    outputs, count = sums // 4 - 1, angles.shape[1]
    result = weights.new_empty(channels, outputs, count, 2)
    _spectrum[(triton.cdiv(count, FREQUENCIES), channels)](
        *(weights.contiguous(), a.contiguous(), b.contiguous(), dt.contiguous(), angles, result),
        *(count, states, outputs, FREQUENCIES),
        num_warps=4,
    )
    return result


@on_its_device
def gradients(  # noqa: PLR0917
    grad: Tensor, weights: Tensor, a: Tensor, b: Tensor, dt: Tensor, angles: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of weights, a, b and dt, computed for a few channels at a time."""
    channels, sums, _ = weights.shape
    step = max(1, ROOM // (sums * angles.shape[1]))
    inputs = [t.contiguous() for t in (grad, weights, a, b, dt)]
    pieces = [
        _gradients([t[h : h + step] for t in inputs], angles) for h in range(0, channels, step)
    ]
    moments, d_dt = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    return moments[:, :sums], moments[:, sums], moments[:, sums + 1], d_dt


def _gradients(inputs: list[Tensor], angles: Tensor) -> tuple[Tensor, Tensor]:
    grad, weights, a, b, dt = inputs
    channels, sums, states = weights.shape
    outputs, count = sums // 4 - 1, angles.shape[1]
    programs = triton.cdiv(count, FREQUENCIES)
    values, d_dt = grad.new_empty(channels, sums, count), grad.new_empty(channels, programs)
    _values[(programs, channels)](
        *(grad, weights, a, b, dt, angles, values, d_dt, count, states, outputs, FREQUENCIES),
        num_warps=4,
    )
    chunk = max(SHORTEST, triton.cdiv(count, CHUNKS))
    chunks = triton.cdiv(count, chunk)
    moments = grad.new_empty(channels, chunks, sums + 2, states)
    _moments[(chunks, channels, triton.cdiv(states, STATES))](
        *(values, weights, a, b, angles, moments, count, chunk, chunks, states, outputs, STATES),
        num_warps=1,
    )
    return moments.sum(1), d_dt.sum(1)


# ------------------------------------------------------------------ complex numbers as two tensors


@triton.jit
@no_type_check
def times(x, y):
    """The complex product; dplr_weights.py uses it, too."""
    return x[0] * y[0] - x[1] * y[1], x[0] * y[1] + x[1] * y[0]


@triton.jit
@no_type_check
def _times_conjugate(x, y):
    return x[0] * y[0] + x[1] * y[1], x[1] * y[0] - x[0] * y[1]


@triton.jit
@no_type_check
def _inner(x, y):
    """`Re(x y*)`."""
    return x[0] * y[0] + x[1] * y[1]


@triton.jit
@no_type_check
def _inverse(x):
    scale = 1.0 / (x[0] * x[0] + x[1] * x[1])
    return x[0] * scale, -x[1] * scale


# ------------------------------------------------------------------ a thread has a frequency


@triton.jit
@no_type_check
def _section(a, b, cos, sin):
    """`1 / q`, `q = b c^2 - s^2 - 2 i s c a`."""
    return _inverse((b * (cos * cos) - sin * sin, a * (-2.0 * sin * cos)))


@triton.jit
@no_type_check
def _add_section(total, weights, row, section, ROWS: tl.constexpr, STATES: tl.constexpr):  # noqa: PLR0917
    """Add a state to the two sums of a row, weighted by `2 Re v` and by `2 Re(v mu*)`."""
    even = tl.load(weights + row * STATES)
    odd = tl.load(weights + (ROWS + row) * STATES)
    return (
        total[0] + even * section[0],
        total[1] + even * section[1],
        total[2] + odd * section[0],
        total[3] + odd * section[1],
    )


@triton.jit
@no_type_check
def _combine(total, cos, sin):
    """The sum of a row, `i s even - c odd`."""
    return -sin * total[1] - cos * total[2], sin * total[0] - cos * total[3]


@triton.jit
@no_type_check
def _sums(weights, a, b, h, cos, sin, STATES: tl.constexpr, OUTPUTS: tl.constexpr):  # noqa: PLR0917
    """R_CB and R_CP of the first output, then of the second (if there are two), R_PB, R_PP."""
    ROWS: tl.constexpr = 2 * OUTPUTS + 2
    zero = tl.zeros_like(cos)
    CB, CP = (zero, zero, zero, zero), (zero, zero, zero, zero)
    DB, DP = (zero, zero, zero, zero), (zero, zero, zero, zero)
    PB, PP = (zero, zero, zero, zero), (zero, zero, zero, zero)
    for n in range(STATES):
        section = _section(tl.load(a + h * STATES + n), tl.load(b + h * STATES + n), cos, sin)
        own = weights + h * (2 * ROWS * STATES) + n
        CB = _add_section(CB, own, 0, section, ROWS, STATES)
        CP = _add_section(CP, own, OUTPUTS, section, ROWS, STATES)
        if OUTPUTS == 2:
            DB = _add_section(DB, own, 1, section, ROWS, STATES)
            DP = _add_section(DP, own, OUTPUTS + 1, section, ROWS, STATES)
        PB = _add_section(PB, own, ROWS - 2, section, ROWS, STATES)
        PP = _add_section(PP, own, ROWS - 1, section, ROWS, STATES)
    return (
        _combine(CB, cos, sin),
        _combine(CP, cos, sin),
        _combine(DB, cos, sin),
        _combine(DP, cos, sin),
        _combine(PB, cos, sin),
        _combine(PP, cos, sin),
    )


@triton.jit
@no_type_check
def _woodbury(scale, PB, PP):
    """`1 / (1 + scale R_PP)`, and `R_PB` times that."""
    inverse = _inverse((scale * PP[0] + 1.0, scale * PP[1]))
    return inverse, times(PB, inverse)


@triton.jit
@no_type_check
def _corrected(CB, CP, ratio, scale):
    """`R_CB - scale R_CP ratio`."""
    product = times(CP, ratio)
    return CB[0] - scale * product[0], CB[1] - scale * product[1]


@triton.jit
@no_type_check
def _angles(angles, f, count):
    """The angles; beyond the last frequency those of the first, whose results are not stored."""
    cos = tl.load(angles + f, mask=f < count, other=1.0)
    return cos, tl.load(angles + count + f, mask=f < count, other=0.0)


@triton.jit(do_not_specialize=["count"])
@no_type_check
def _spectrum(  # noqa: PLR0917
    weights, a, b, dt, angles, result, count,
    STATES: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    f = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    h = tl.program_id(1).to(tl.int64)
    cos, sin = _angles(angles, f, count)
    CB, CP, DB, DP, PB, PP = _sums(weights, a, b, h, cos, sin, STATES, OUTPUTS)
    half = tl.load(dt + h) * 0.5
    scale = half * cos
    turn = (scale, half * sin)
    _, ratio = _woodbury(scale, PB, PP)
    at = result + 2 * (h * OUTPUTS * count + f)
    re, im = times(turn, _corrected(CB, CP, ratio, scale))
    tl.store(at, re, mask=f < count)
    tl.store(at + 1, im, mask=f < count)
    if OUTPUTS == 2:
        re, im = times(turn, _corrected(DB, DP, ratio, scale))
        tl.store(at + 2 * count, re, mask=f < count)
        tl.store(at + 2 * count + 1, im, mask=f < count)


@triton.jit
@no_type_check
def _store_gradient(at, row, value, count, known):
    """Store a row's gradient for the kernel that adds over the frequencies."""
    tl.store(at + 2 * row * count, value[0], mask=known)
    tl.store(at + (2 * row + 1) * count, value[1], mask=known)


@triton.jit
@no_type_check
def _output_gradient(grad, CB, CP, ratio, scale, half, cos, sin):  # noqa: PLR0917
    """From an output's gradient those of R_CB, R_CP, of the ratio, and of `dt / 2`."""
    corrected = _corrected(CB, CP, ratio, scale)
    d_half = _inner(grad, times((cos, sin), corrected))
    d_CB = _times_conjugate(grad, (half * cos, half * sin))
    d_product = (-scale * d_CB[0], -scale * d_CB[1])
    d_half -= cos * _inner(d_CB, times(CP, ratio))
    return d_CB, _times_conjugate(d_product, ratio), _times_conjugate(d_product, CP), d_half


@triton.jit(do_not_specialize=["count"])
@no_type_check
def _values(  # noqa: PLR0917
    grad, weights, a, b, dt, angles, values, d_dt, count,
    STATES: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    f = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    h = tl.program_id(1).to(tl.int64)
    known = f < count
    cos, sin = _angles(angles, f, count)
    CB, CP, DB, DP, PB, PP = _sums(weights, a, b, h, cos, sin, STATES, OUTPUTS)
    half = tl.load(dt + h) * 0.5
    scale = half * cos
    inverse, ratio = _woodbury(scale, PB, PP)
    source = grad + 2 * (h * OUTPUTS * count + f)
    at = values + h * (4 * OUTPUTS + 4) * count + f
    given = (
        tl.load(source, mask=known, other=0.0),
        tl.load(source + 1, mask=known, other=0.0),
    )
    d_CB, d_CP, d_ratio, d_half = _output_gradient(given, CB, CP, ratio, scale, half, cos, sin)
    _store_gradient(at, 0, d_CB, count, known)
    _store_gradient(at, OUTPUTS, d_CP, count, known)
    if OUTPUTS == 2:
        source += 2 * count
        given = (
            tl.load(source, mask=known, other=0.0),
            tl.load(source + 1, mask=known, other=0.0),
        )
        d_DB, d_DP, d_second, more = _output_gradient(given, DB, DP, ratio, scale, half, cos, sin)
        _store_gradient(at, 1, d_DB, count, known)
        _store_gradient(at, OUTPUTS + 1, d_DP, count, known)
        d_ratio = (d_ratio[0] + d_second[0], d_ratio[1] + d_second[1])
        d_half += more
    d_PB = _times_conjugate(d_ratio, inverse)
    d_below = _times_conjugate(d_PB, ratio)  # with the opposite sign
    d_half -= cos * _inner(d_below, PP)
    _store_gradient(at, 2 * OUTPUTS, d_PB, count, known)
    _store_gradient(at, 2 * OUTPUTS + 1, (-scale * d_below[0], -scale * d_below[1]), count, known)
    tl.store(d_dt + h * tl.num_programs(0) + tl.program_id(0), tl.sum(d_half, 0) * 0.5)


# ------------------------------------------------------------------ a thread has a state


@triton.jit
@no_type_check
def _weights(weights, row, n, ROWS: tl.constexpr, STATES: tl.constexpr):
    even = tl.load(weights + row * STATES + n, mask=n < STATES, other=0.0)
    return even, tl.load(weights + (ROWS + row) * STATES + n, mask=n < STATES, other=0.0)


@triton.jit
@no_type_check
def _moment(moment, total, weight, values, row, count, by_sin, by_cos):  # noqa: PLR0917
    """Add a frequency to the gradients of a row's two weights, and a row to those of `1 / q`."""
    re = tl.load(values + 2 * row * count)
    im = tl.load(values + (2 * row + 1) * count)
    moment = (
        moment[0] + im * by_sin[0] - re * by_sin[1],
        moment[1] - re * by_cos[0] - im * by_cos[1],
    )
    total = (
        total[0] + weight[0] * re,
        total[1] + weight[0] * im,
        total[2] + weight[1] * re,
        total[3] + weight[1] * im,
    )
    return moment, total


@triton.jit
@no_type_check
def _store_moment(at, row, moment, n, ROWS: tl.constexpr, STATES: tl.constexpr):  # noqa: PLR0917
    tl.store(at + row * STATES + n, moment[0], mask=n < STATES)
    tl.store(at + (ROWS + row) * STATES + n, moment[1], mask=n < STATES)


@triton.jit(do_not_specialize=["count", "chunk", "chunks"])
@no_type_check
def _moments(  # noqa: PLR0917
    values, weights, a, b, angles, moments, count, chunk, chunks,
    STATES: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = 2 * OUTPUTS + 2
    h = tl.program_id(1).to(tl.int64)
    n = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    own_a = tl.load(a + h * STATES + n, mask=n < STATES, other=-1.0)
    own_b = tl.load(b + h * STATES + n, mask=n < STATES, other=1.0)
    weights += h * (2 * ROWS * STATES)
    w_CB, w_CP = _weights(weights, 0, n, ROWS, STATES), _weights(weights, OUTPUTS, n, ROWS, STATES)
    w_PB = _weights(weights, ROWS - 2, n, ROWS, STATES)
    w_PP = _weights(weights, ROWS - 1, n, ROWS, STATES)
    w_DB, w_DP = w_CB, w_CP
    if OUTPUTS == 2:
        w_DB = _weights(weights, 1, n, ROWS, STATES)
        w_DP = _weights(weights, OUTPUTS + 1, n, ROWS, STATES)
    zero = tl.zeros_like(own_a)
    CB, CP, DB, DP, PB, PP = (
        (zero, zero), (zero, zero), (zero, zero), (zero, zero), (zero, zero), (zero, zero)
    )  # fmt: skip
    d_a, d_b = zero, zero
    first = tl.program_id(0) * chunk
    for f in range(first, tl.minimum(first + chunk, count)):
        cos, sin = tl.load(angles + f), tl.load(angles + count + f)
        section = _section(own_a, own_b, cos, sin)
        by_sin = (sin * section[0], sin * section[1])
        by_cos = (cos * section[0], cos * section[1])
        at = values + h * (2 * ROWS) * count + f
        total = (zero, zero, zero, zero)
        CB, total = _moment(CB, total, w_CB, at, 0, count, by_sin, by_cos)
        CP, total = _moment(CP, total, w_CP, at, OUTPUTS, count, by_sin, by_cos)
        if OUTPUTS == 2:
            DB, total = _moment(DB, total, w_DB, at, 1, count, by_sin, by_cos)
            DP, total = _moment(DP, total, w_DP, at, OUTPUTS + 1, count, by_sin, by_cos)
        PB, total = _moment(PB, total, w_PB, at, ROWS - 2, count, by_sin, by_cos)
        PP, total = _moment(PP, total, w_PP, at, ROWS - 1, count, by_sin, by_cos)
        # the gradient of 1 / q is `-i s even - c odd`; its slopes are `-(c^2, -2 i s c) / q^2`
        d_section = (sin * total[1] - cos * total[2], -sin * total[0] - cos * total[3])
        slope = _times_conjugate(times(section, section), d_section)
        d_a -= (2.0 * sin * cos) * slope[1]
        d_b -= (cos * cos) * slope[0]
    at = moments + (h * chunks + tl.program_id(0)) * ((2 * ROWS + 2) * STATES)
    _store_moment(at, 0, CB, n, ROWS, STATES)
    _store_moment(at, OUTPUTS, CP, n, ROWS, STATES)
    if OUTPUTS == 2:
        _store_moment(at, 1, DB, n, ROWS, STATES)
        _store_moment(at, OUTPUTS + 1, DP, n, ROWS, STATES)
    _store_moment(at, ROWS - 2, PB, n, ROWS, STATES)
    _store_moment(at, ROWS - 1, PP, n, ROWS, STATES)
    tl.store(at + 2 * ROWS * STATES + n, d_a, mask=n < STATES)
    tl.store(at + (2 * ROWS + 1) * STATES + n, d_b, mask=n < STATES)
