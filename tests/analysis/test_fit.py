import math
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import refused

from dlrnn.analysis import fit_kernel, shift_weight_norms
from dlrnn.analysis.fit import chebyshev_points, log2_shift_weights


def close(actual, expected, tolerance=1e-12):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def slow_rows(lam, length):
    """Real rows whose combinations are the kernels: P, or Re P and -Im P."""
    P = torch.tensor(
        [[value**k for k in range(length)] for value in lam.tolist()],
        dtype=torch.complex128 if lam.is_complex() else torch.float64,
    )
    return torch.cat((P.real, -P.imag)) if lam.is_complex() else P


def random_lam(states, real, seed=0):
    g = torch.Generator().manual_seed(seed)
    modulus = 0.5 + 0.5 * torch.rand(states, generator=g, dtype=torch.float64)
    phase = 2 * math.pi * torch.rand(states, generator=g, dtype=torch.float64)
    return modulus if real else torch.polar(modulus, phase)


# ---------------------------------------------------------------------------------- fits


@pytest.mark.parametrize("size", [1, 2, 3, 8, 17, 64])
def test_dft_phases_fit_every_kernel_exactly(size):
    kernel = torch.randn(3, size, dtype=torch.float64)
    angle = 2 * math.pi * torch.arange(size, dtype=torch.float64) / size
    fit = fit_kernel(kernel, torch.polar(torch.ones_like(angle), angle))
    assert fit.condition == pytest.approx(1, abs=1e-12)
    assert fit.residual < 1e-14
    # The weights of least norm are the inverse transform itself.
    close(fit.w, torch.fft.fft(kernel.to(torch.complex128)) / size)


@pytest.mark.parametrize("real", [False, True])
@pytest.mark.parametrize(("states", "length"), [(1, 1), (1, 7), (3, 1), (2, 9), (4, 5), (3, 30)])
def test_fit_is_the_least_squares_solution_of_least_norm(states, length, real):
    kernel, lam = torch.randn(2, length, dtype=torch.float64), random_lam(states, real)
    fit, rows = fit_kernel(kernel, lam), slow_rows(lam, length)
    expected = kernel @ torch.linalg.pinv(rows)
    flat = fit.w if real else torch.cat((fit.w.real, fit.w.imag), dim=1)
    assert fit.w.dtype == (torch.float64 if real else torch.complex128)
    close(flat, expected, 1e-9)
    residual = torch.linalg.norm(flat @ rows - kernel) / torch.linalg.norm(kernel)
    assert fit.residual == pytest.approx(residual.item(), abs=1e-12)
    sigma = torch.linalg.svdvals(rows)
    assert fit.condition == pytest.approx((sigma[0] / sigma[-1]).item(), rel=1e-6)


def test_a_kernel_that_can_be_had_is_found():
    lam = torch.polar(torch.full((6,), 0.95).double(), torch.arange(6).double())
    lam[2] = 0  # the impulse
    w = torch.randn(3, 6, dtype=torch.complex128)
    kernel = (w @ torch.complex(*slow_rows(lam, 40).chunk(2)).conj()).real
    assert fit_kernel(kernel, lam).residual < 1e-13


def test_a_single_kernel_is_one_channel():
    kernel = torch.randn(9, dtype=torch.float64)
    lam = random_lam(3, real=False)
    one, many = fit_kernel(kernel, lam), fit_kernel(kernel[None], lam)
    assert one.w.shape == (1, 3)
    assert torch.equal(one.w, many.w)
    assert fit_kernel(torch.zeros(9), lam).residual == 0


def test_single_precision_is_fitted_in_double():
    lam = random_lam(3, real=True).float()
    kernel = (torch.ones(1, 3, dtype=torch.float64) @ slow_rows(lam, 5)).float()
    fit = fit_kernel(kernel, lam)
    assert fit.w.dtype == torch.float64
    assert fit.residual < 1e-6


def test_two_equal_states_have_an_infinite_condition_and_share_the_weight():
    fit = fit_kernel(torch.tensor([4.0, 0.0]), torch.zeros(2))
    assert fit.condition == math.inf
    close(fit.w, torch.tensor([[2.0, 2.0]], dtype=torch.float64))


@pytest.mark.parametrize(
    ("kernel", "lam", "keywords"),
    [
        (torch.ones(2, 3, 4), torch.ones(2), ("kernel", "[H, L]", "[2, 3, 4]")),
        (torch.ones(2, 0), torch.ones(2), ("kernel", "empty")),
        (torch.ones(3).cfloat(), torch.ones(2), ("kernel", "real")),
        (torch.ones(3), torch.ones(2, 2), ("lam", "[N]", "[2, 2]")),
        (torch.ones(3), torch.ones(0), ("lam", "empty")),
        (torch.ones(3) * math.nan, torch.ones(2), ("kernel", "lam", "finite")),
        (torch.ones(400), torch.full((1,), 1e3).cdouble(), ("kernel", "lam", "finite")),
    ],
)
def test_bad_input_is_refused(kernel, lam, keywords):
    with refused(*keywords):
        fit_kernel(kernel, lam)


# ---------------------------------------------------------------------------------- shifts


def exact_shift_weights(lam):
    """Solve w P = (0, ..., 0, 1) by Gauss-Jordan elimination over the rational numbers."""
    size = len(lam)
    rows = [[value**k for value in lam] + [Fraction(k == size - 1)] for k in range(size)]
    for i in range(size):  # different lambda: no pivot is 0
        rows[i] = [value / rows[i][i] for value in rows[i]]
        for j in range(size):
            if j != i:
                rows[j] = [a - rows[j][i] * b for a, b in zip(rows[j], rows[i], strict=True)]
    return [row[-1] for row in rows]


@pytest.mark.parametrize("size", [1, 2, 3, 6, 11])
def test_closed_form_of_the_shift_weights_is_exact(size):
    points = chebyshev_points(size)
    exact = exact_shift_weights([Fraction(value) for value in points.tolist()])
    expected = torch.tensor([math.log2(abs(w)) for w in exact], dtype=torch.float64)
    close(log2_shift_weights(points), expected)


def test_real_weights_grow_fourfold_with_each_state_and_complex_ones_shrink():
    sizes = [1, 2, 3, 4, 8, 16, 32, 64, 128]
    rows = shift_weight_norms(sizes)
    assert [row.N for row in rows] == sizes
    for row in rows:
        # prod_{j != i} (x_i - x_j) = T_N'(x_i) / 2^(N-1) and |T_N'(x_i)| = N / sin(angle_i) on
        # [-1, 1], hence max |w| = 4^(N-1) / N times the largest sine.
        sine = max(math.sin((i + 0.5) * math.pi / row.N) for i in range(row.N))
        exact = 2 * (row.N - 1) - math.log2(row.N) + math.log2(sine)
        assert row.log2_real == pytest.approx(exact, abs=1e-9)
        assert row.log2_real >= 2 * row.N - math.log2(row.N) - 2.51  # 2.5 at N = 2, else below 2.12
        assert row.log2_complex == pytest.approx(-math.log2(row.N), abs=1e-9)
        assert row.condition_complex == pytest.approx(1, abs=1e-9)
    slopes = [
        (b.log2_real - a.log2_real + math.log2(b.N / a.N)) / (b.N - a.N)
        for a, b in pairwise(rows[3:])
    ]
    assert slopes == pytest.approx([2.0] * len(slopes), abs=0.03)
    conditions = [row.condition_real for row in rows if row.N <= 16]
    assert all(b > a for a, b in pairwise(conditions))
    assert conditions[-1] > 1e11


def test_shift_weights_beyond_the_range_of_float64_and_of_no_state():
    (row,) = shift_weight_norms([600])
    assert row.log2_real == pytest.approx(2 * 599 - math.log2(600), abs=1e-4)
    with refused("at least 1", "0"):
        shift_weight_norms([4, 0])


@settings(max_examples=60, deadline=None)
@given(st.sets(st.floats(0, 1, allow_subnormal=False), min_size=2, max_size=12))
def test_no_real_lambda_does_better_than_two_bits_a_state(values):
    # The Chebyshev polynomial's leading coefficient: sum |w| >= 2^(2N - 3).
    lam, size = torch.tensor(sorted(values), dtype=torch.float64), len(values)
    assert log2_shift_weights(lam).max() >= 2 * size - 3 - math.log2(size) - 1e-9
