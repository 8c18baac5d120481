"""From a diagonal-plus-low-rank system to the weights of its sections (ops/dplr.py), in float64.

A program has a channel. It computes the transposed matrix of a time step in registers and
multiplies rows of C by its n-th power by repeated squaring. Backward stores the squares in memory
and launches a kernel for each binary digit of n. PyTorch needs 370 small kernels for forward and
backward, this module 40.
"""
# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from dlrnn.common.device import on_its_device
from dlrnn.ops.dplr import DPLR
from dlrnn.ops.pairs import conjugate
from dlrnn.ops.triton.sections import times

LARGEST = 64  # states N of a matrix that fits into a program's registers
HEIGHT = 16  # the fewest rows of a matrix product
WARPS = 8


@on_its_device
def weights(system: DPLR, length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weights [H, 4 R + 4, M], a and b [H, M], and `C - C Abar^n`; R 1 or 2."""
    Lambda, P, B, C, dt = system
    outputs, channels, pairs, _ = C.shape
    corrected = torch.empty_like(C)
    _rows[(channels,)](
        *(Lambda, P, C, dt, corrected, corrected, corrected),
        **_sizes(C, length),
        KEEP=False,
        num_warps=WARPS,
    )
    result, a, b = C.new_empty(channels, 4 * outputs + 4, pairs), *C.new_empty(2, channels, pairs)
    _weights[(channels,)](
        *(Lambda, P, B, corrected, dt, result, a, b, channels),
        *(pairs, outputs, triton.next_power_of_2(pairs)),
        num_warps=1,
    )
    return result, a, b, corrected


@on_its_device
def gradients(
    grads: tuple[Tensor, ...], system: DPLR, corrected: Tensor, length: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of the system's five tensors."""
    Lambda, P, B, C, dt = system
    outputs, channels, pairs, _ = C.shape
    d_corrected = torch.empty_like(C)
    d_dt = C.new_empty(2, channels)
    near = C.new_empty(channels, 6, pairs)
    _weights_back[(channels,)](
        *(Lambda, P, B, corrected, dt, *(grad.contiguous() for grad in grads)),
        *(d_corrected, near, d_dt, channels, pairs, outputs, triton.next_power_of_2(pairs)),
        num_warps=1,
    )
    d_C, d_step = _rows_gradients(d_corrected, system, length)
    far = C.new_empty(channels, 4, 2 * pairs)
    _step_back[(channels,)](
        *(Lambda, P, dt, d_step, far, d_dt[1], 2 * pairs, _width(pairs)), num_warps=WARPS
    )
    d_Lambda, d_P, d_B = near.sum(0).view(3, 2, pairs).transpose(1, 2)
    by_Lambda, by_P = far.sum(0).view(2, 2, pairs, 2)
    return d_Lambda + by_Lambda.sum(-1).t(), d_P + by_P.sum(0), d_B, d_C, d_dt.sum(0)


def _rows_gradients(grad: Tensor, system: DPLR, length: int) -> tuple[Tensor, Tensor]:
    """From the gradient of `C - C Abar^n` those of C and of the step's matrix, [H, N, N]."""
    Lambda, P, _, C, dt = system
    outputs, channels, pairs, _ = C.shape
    squares = C.new_empty(length.bit_length(), channels, 2 * pairs, 2 * pairs)
    kept = C.new_empty(length.bit_length(), channels, outputs, 2 * pairs)
    _rows[(channels,)](
        *(Lambda, P, C, dt, C, squares, kept), **_sizes(C, length), KEEP=True, num_warps=WARPS
    )
    d_rows = -conjugate(grad).flatten(-2).transpose(0, 1).contiguous()  # [H, R, N]
    d_step = squares[0]  # not read at first
    for bit in reversed(range(length.bit_length())):
        of_square, d_step = d_step, torch.empty_like(squares[0])
        has_square, has_rows = bit + 1 < length.bit_length(), length >> bit & 1 == 1
        of_rows, d_rows = d_rows, torch.empty_like(d_rows) if has_rows else d_rows
        _power_back[(channels,)](
            *(squares[bit], kept[bit], of_square, of_rows, d_step, d_rows, 2 * pairs, outputs),
            *(HEIGHT, _width(pairs), has_square, has_rows),
            num_warps=WARPS,
        )
    return grad + conjugate(d_rows.transpose(0, 1).unflatten(-1, (pairs, 2))), d_step


def _width(pairs: int) -> int:
    return max(16, 1 << (2 * pairs - 1).bit_length())


def _sizes(C: Tensor, length: int) -> dict[str, Any]:
    outputs, channels, pairs, _ = C.shape
    return {
        "channels": channels,
        "n": length,
        "bits": length.bit_length(),
        "STATES": 2 * pairs,
        "OUTPUTS": outputs,
        "HEIGHT": HEIGHT,
        "WIDTH": _width(pairs),
    }


# ------------------------------------------------------------------ rows and the power of a step


@triton.jit
@no_type_check
def _vectors(Lambda, P, half, STATES: tl.constexpr, WIDTH: tl.constexpr):
    """Of each real number: P, the other P of its pair, Lambda, `1 / (1 - mu) = x + i y`, sign."""
    i = tl.arange(0, WIDTH)
    known = i < STATES
    own = tl.load(P + i, mask=known, other=0.0)
    other = tl.load(P + (i ^ 1), mask=known, other=0.0)
    re = tl.load(Lambda + (i & ~1), mask=known, other=0.0)
    im = tl.load(Lambda + (i | 1), mask=known, other=0.0)
    rest, turn = 1.0 - half * re, half * im
    size = rest * rest + turn * turn
    sign = (1 - 2 * (i & 1)).to(tl.float64)
    return own, other, re, im, rest / size, turn / size, sign


@triton.jit
@no_type_check
def _rank_one(own, other, x, y, sign, dt):  # noqa: PLR0917
    """`P / (1 - mu)`, `P / (1 - mu)*`, and `dt / (1 + dt along)` (Sherman-Morrison)."""
    along = tl.sum(own * own * x, 0)
    return x * own - sign * y * other, x * own + sign * y * other, dt / (dt * along + 1.0)


@triton.jit(do_not_specialize=["channels", "n", "bits"])
@no_type_check
def _rows(  # noqa: PLR0917
    Lambda, P, C, dt, result, squares, kept, channels, n, bits,
    STATES: tl.constexpr, OUTPUTS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    KEEP: tl.constexpr,
):  # fmt: skip
    """`C - C Abar^n`; or, with KEEP, all squares of the step and the rows before each of them."""
    h = tl.program_id(0).to(tl.int64)
    length = tl.load(dt + h)
    own, other, _, _, x, y, sign = _vectors(Lambda, P, length * 0.5, STATES, WIDTH)
    q, u, k = _rank_one(own, other, x, y, sign, length)
    i = tl.arange(0, WIDTH)
    row, column = i[:, None], i[None, :]
    step = tl.where(row == column, (2.0 * x - 1.0)[:, None], 0.0)
    step = tl.where((row ^ 1) == column, (-2.0 * sign * y)[:, None], step)
    step -= ((2.0 * k) * q)[:, None] * u[None, :]
    step = tl.where((row < STATES) & (column < STATES), step, 0.0)
    r = tl.arange(0, HEIGHT)[:, None]
    at = (r * channels + h) * STATES + column
    known = (r < OUTPUTS) & (column < STATES)
    given = tl.load(C + at, mask=known, other=0.0)
    rows = given * sign[None, :]
    for bit in range(bits):
        if KEEP:
            place = bit * channels + h
            inside = (row < STATES) & (column < STATES)
            tl.store(squares + (place * STATES + row) * STATES + column, step, mask=inside)
            tl.store(kept + (place * OUTPUTS + r) * STATES + column, rows, mask=known)
        if (n >> bit) & 1:
            rows = tl.dot(rows, step, out_dtype=tl.float64)
        step = tl.dot(step, step, out_dtype=tl.float64)
    if not KEEP:
        tl.store(result + at, given - rows * sign[None, :], mask=known)


@triton.jit
@no_type_check
def _load_columns(  # noqa: PLR0917
    matrix, first, STATES: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
    COUNT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """COUNT columns of a matrix or of its transpose, with strides DOWN and ACROSS."""
    i, j = tl.arange(0, WIDTH)[:, None], first + tl.arange(0, COUNT)[None, :]
    return tl.load(matrix + i * DOWN + j * ACROSS, mask=(i < STATES) & (j < STATES), other=0.0)


@triton.jit
@no_type_check
def _power_back(  # noqa: PLR0917
    square, kept, of_square, of_rows, d_step, d_rows,
    STATES: tl.constexpr, OUTPUTS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    HAS_SQUARE: tl.constexpr, HAS_ROWS: tl.constexpr,
):  # fmt: skip
    """From the gradients of `step step` and `rows step`, if any, those of step and rows."""
    h = tl.program_id(0).to(tl.int64)
    square += h * STATES * STATES
    i = tl.arange(0, WIDTH)
    row, column = i[:, None], i[None, :]
    total = tl.zeros((WIDTH, WIDTH), dtype=tl.float64)
    if HAS_SQUARE:  # of_square step^T + step^T of_square
        of_square += h * STATES * STATES
        for first in range(0, WIDTH, HEIGHT):
            left = _load_columns(of_square, first, STATES, STATES, 1, HEIGHT, WIDTH)
            right = _load_columns(square, first, STATES, STATES, 1, HEIGHT, WIDTH)
            total = tl.dot(left, tl.trans(right), total, out_dtype=tl.float64)
        for first in range(0, WIDTH, HEIGHT):
            left = _load_columns(square, first, STATES, 1, STATES, HEIGHT, WIDTH)
            right = _load_columns(of_square, first, STATES, 1, STATES, HEIGHT, WIDTH)
            total = tl.dot(left, tl.trans(right), total, out_dtype=tl.float64)
    if HAS_ROWS:
        r = tl.arange(0, HEIGHT)[:, None]
        known = (r < OUTPUTS) & (column < STATES)
        at = (h * OUTPUTS + r) * STATES + column
        rows = tl.load(kept + at, mask=known, other=0.0)
        given = tl.load(of_rows + at, mask=known, other=0.0)
        total = tl.dot(tl.trans(rows), given, total, out_dtype=tl.float64)
        inside = (row < STATES) & (column < STATES)
        step = tl.load(square + column * STATES + row, mask=inside, other=0.0)
        tl.store(d_rows + at, tl.dot(given, step, out_dtype=tl.float64), mask=known)
    at = (h * STATES + row) * STATES + column
    tl.store(d_step + at, total, mask=(row < STATES) & (column < STATES))


@triton.jit
@no_type_check
def _step_back(  # noqa: PLR0917
    Lambda, P, dt, grad, parts, d_dt, STATES: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """The gradients of Lambda (in two parts for each pair), of P (own, other) and of dt."""
    h = tl.program_id(0).to(tl.int64)
    length = tl.load(dt + h)
    own, other, re, im, x, y, sign = _vectors(Lambda, P, length * 0.5, STATES, WIDTH)
    i = tl.arange(0, WIDTH)
    row, column = i[:, None], i[None, :]
    inside = (row < STATES) & (column < STATES)
    d_step = tl.load(grad + (h * STATES + row) * STATES + column, mask=inside, other=0.0)
    q, u, k = _rank_one(own, other, x, y, sign, length)
    d_x = 2.0 * tl.sum(tl.where(row == column, d_step, 0.0), 1)
    d_y = -2.0 * sign * tl.sum(tl.where((row ^ 1) == column, d_step, 0.0), 1)
    d_q = -2.0 * tl.sum(d_step * u[None, :], 1)  # times k
    d_u = -2.0 * tl.sum(d_step * q[:, None], 0)
    d_k = tl.sum(d_q * q, 0)
    d_q, d_u = k * d_q, k * d_u
    # k = dt / (1 + dt along)
    d_length = d_k * (k / length) * (k / length)
    d_along = -d_k * k * k
    d_x += own * (d_q + d_u + d_along * own)
    d_y += sign * other * (d_u - d_q)
    d_own = x * (d_q + d_u + 2.0 * d_along * own)
    square_re, square_im = x * x - y * y, 2.0 * x * y
    d_re = 0.5 * (d_x * square_re + d_y * square_im)
    d_im = 0.5 * (d_y * square_re - d_x * square_im)
    d_length += tl.sum(d_re * re + d_im * im, 0)
    tl.store(d_dt + h, d_length)
    parts += h * 4 * STATES
    tl.store(parts + i, length * d_re, mask=i < STATES)
    tl.store(parts + STATES + i, length * d_im, mask=i < STATES)
    tl.store(parts + 2 * STATES + i, d_own, mask=i < STATES)
    tl.store(parts + 3 * STATES + (i ^ 1), sign * y * (d_u - d_q), mask=i < STATES)


# ------------------------------------------------------------------ weights


@triton.jit
@no_type_check
def _load_pair(at, m, known):
    return tl.load(at + 2 * m, mask=known, other=0.0), tl.load(
        at + 2 * m + 1, mask=known, other=0.0
    )


@triton.jit
@no_type_check
def _plus(x, y):
    return x[0] + y[0], x[1] + y[1]


@triton.jit
@no_type_check
def _conjugate(x):
    return x[0], -x[1]


@triton.jit
@no_type_check
def _store_weights(at, row, v, mu, m, ROWS: tl.constexpr, PAIRS: tl.constexpr):  # noqa: PLR0917
    """Store `2 Re v` and `2 Re(v mu*)`."""
    tl.store(at + row * PAIRS + m, 2.0 * v[0], mask=m < PAIRS)
    tl.store(at + (ROWS + row) * PAIRS + m, 2.0 * (v[0] * mu[0] + v[1] * mu[1]), mask=m < PAIRS)


@triton.jit(do_not_specialize=["channels"])
@no_type_check
def _weights(  # noqa: PLR0917
    Lambda, P, B, C, dt, result, a, b, channels,
    PAIRS: tl.constexpr, OUTPUTS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = 2 * OUTPUTS + 2
    h = tl.program_id(0).to(tl.int64)
    m = tl.arange(0, WIDTH)
    known = m < PAIRS
    half = tl.load(dt + h) * 0.5
    slope, p, q = _load_pair(Lambda, m, known), _load_pair(P, m, known), _load_pair(B, m, known)
    mu = (half * slope[0], half * slope[1])
    result += h * (2 * ROWS * PAIRS)
    for r in tl.static_range(OUTPUTS):
        c = _load_pair(C + (r * channels + h) * (2 * PAIRS), m, known)
        _store_weights(result, r, times(c, q), mu, m, ROWS, PAIRS)
        _store_weights(result, OUTPUTS + r, times(c, p), mu, m, ROWS, PAIRS)
    _store_weights(result, ROWS - 2, times(_conjugate(p), q), mu, m, ROWS, PAIRS)
    _store_weights(result, ROWS - 1, times(_conjugate(p), p), mu, m, ROWS, PAIRS)
    tl.store(a + h * PAIRS + m, mu[0], mask=known)
    tl.store(b + h * PAIRS + m, mu[0] * mu[0] + mu[1] * mu[1], mask=known)


@triton.jit
@no_type_check
def _load_gradient(grad, row, v, mu, d_mu, m, ROWS: tl.constexpr, PAIRS: tl.constexpr):  # noqa: PLR0917
    """The gradient of v, and that of mu with the contribution of v."""
    even = 2.0 * tl.load(grad + row * PAIRS + m, mask=m < PAIRS, other=0.0)
    odd = 2.0 * tl.load(grad + (ROWS + row) * PAIRS + m, mask=m < PAIRS, other=0.0)
    return (even + odd * mu[0], odd * mu[1]), (d_mu[0] + odd * v[0], d_mu[1] + odd * v[1])


@triton.jit(do_not_specialize=["channels"])
@no_type_check
def _weights_back(  # noqa: PLR0917
    Lambda, P, B, C, dt, grad, grad_a, grad_b, d_C, parts, d_dt, channels,
    PAIRS: tl.constexpr, OUTPUTS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = 2 * OUTPUTS + 2
    h = tl.program_id(0).to(tl.int64)
    m = tl.arange(0, WIDTH)
    known = m < PAIRS
    length = tl.load(dt + h)
    half = length * 0.5
    slope, p, q = _load_pair(Lambda, m, known), _load_pair(P, m, known), _load_pair(B, m, known)
    mu = (half * slope[0], half * slope[1])
    grad += h * (2 * ROWS * PAIRS)
    by_a = tl.load(grad_a + h * PAIRS + m, mask=known, other=0.0)
    by_b = 2.0 * tl.load(grad_b + h * PAIRS + m, mask=known, other=0.0)
    d_mu = (by_a + by_b * mu[0], by_b * mu[1])
    d_PB, d_mu = _load_gradient(grad, ROWS - 2, times(_conjugate(p), q), mu, d_mu, m, ROWS, PAIRS)
    d_PP, d_mu = _load_gradient(grad, ROWS - 1, times(_conjugate(p), p), mu, d_mu, m, ROWS, PAIRS)
    d_q = times(d_PB, p)
    d_p = _plus(times(_conjugate(d_PB), q), (2.0 * d_PP[0] * p[0], 2.0 * d_PP[0] * p[1]))
    for r in tl.static_range(OUTPUTS):
        at = (r * channels + h) * (2 * PAIRS)
        c = _load_pair(C + at, m, known)
        d_CB, d_mu = _load_gradient(grad, r, times(c, q), mu, d_mu, m, ROWS, PAIRS)
        d_CP, d_mu = _load_gradient(grad, OUTPUTS + r, times(c, p), mu, d_mu, m, ROWS, PAIRS)
        d_q = _plus(d_q, times(d_CB, _conjugate(c)))
        d_p = _plus(d_p, times(d_CP, _conjugate(c)))
        d_c = _plus(times(d_CB, _conjugate(q)), times(d_CP, _conjugate(p)))
        tl.store(d_C + at + 2 * m, d_c[0], mask=known)
        tl.store(d_C + at + 2 * m + 1, d_c[1], mask=known)
    tl.store(d_dt + h, 0.5 * tl.sum(d_mu[0] * slope[0] + d_mu[1] * slope[1], 0))
    parts += h * (6 * PAIRS) + m
    tl.store(parts, half * d_mu[0], mask=known)
    tl.store(parts + PAIRS, half * d_mu[1], mask=known)
    tl.store(parts + 2 * PAIRS, d_p[0], mask=known)
    tl.store(parts + 3 * PAIRS, d_p[1], mask=known)
    tl.store(parts + 4 * PAIRS, d_q[0], mask=known)
    tl.store(parts + 5 * PAIRS, d_q[1], mask=known)
