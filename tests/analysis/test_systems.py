import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import refused

from dlrnn import analysis
from dlrnn.bench.measure import peak_bytes
from dlrnn.nn import DLR

SIZES = [(1, 1, 1), (1, 1, 9), (3, 5, 7), (2, 9, 130), (5, 2, 1)]


def random_system(channels, states, seed=0, *, with_zero=False):
    """|lambda| in [0.9, 1], the first one just below 1, the last one 0 if asked for."""
    g = torch.Generator().manual_seed(seed)
    modulus = 0.9 + 0.1 * torch.rand(states, generator=g, dtype=torch.float64)
    modulus[0] = 1 - 1e-9
    if with_zero:
        modulus[-1] = 0
    phase = 2 * math.pi * torch.rand(states, generator=g, dtype=torch.float64)
    w = torch.randn(channels, states, generator=g, dtype=torch.complex128)
    return analysis.System(torch.polar(modulus, phase), w)


def slow_kernel(system, length):
    """K_k = sum_n w_n lambda_n^k with Python's own powers; 0 ** 0 is 1."""
    lam, w = system.lam.tolist(), system.w.tolist()
    rows = [
        [sum(w_n * lam_n**k for w_n, lam_n in zip(row, lam, strict=True)) for k in range(length)]
        for row in w
    ]
    return torch.tensor(rows, dtype=torch.complex128)


def close(actual, expected, tolerance=1e-12):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


# ---------------------------------------------------------------------------------- kernels


@pytest.mark.parametrize(("channels", "states", "length"), SIZES)
@pytest.mark.parametrize("with_zero", [False, True])
def test_kernel_is_its_definition(channels, states, length, with_zero):
    system = random_system(channels, states, with_zero=with_zero)
    kernel = system.kernel(length)
    assert kernel.shape == (channels, length)
    assert kernel.dtype == torch.complex128
    close(kernel, slow_kernel(system, length))


def test_kernel_outside_the_unit_circle_and_on_it():
    lam = torch.tensor([1.01 + 0.02j, -1, 1j], dtype=torch.complex128)
    system = analysis.System(lam, torch.tensor([[1.0, 2, 3j]], dtype=torch.complex128))
    close(system.kernel(300), slow_kernel(system, 300), 1e-11)


def test_a_long_kernel_makes_no_three_dimensional_tensor():
    system = random_system(64, 64)
    peak = peak_bytes(lambda: system.kernel(2**12), torch.device("cpu"))
    assert peak < 2**25  # H N L complex numbers would be 2^28


@pytest.mark.parametrize(
    ("lam", "w", "keywords"),
    [
        (torch.ones(2, 1).cdouble(), torch.ones(1, 2).cdouble(), ("lam", "[N]", "[2, 1]")),
        (torch.ones(2).cdouble(), torch.ones(1, 3).cdouble(), ("w", "[H, 2]", "[1, 3]")),
        (torch.ones(2).cdouble(), torch.ones(1, 2).cfloat(), ("w", "complex128", "complex64")),
        (torch.ones(0).cdouble(), torch.ones(1, 0).cdouble(), ("lam", "at least one state")),
        (torch.full((1,), math.nan).cdouble(), torch.ones(1, 1).cdouble(), ("lam", "finite")),
    ],
)
def test_a_bad_system_is_refused(lam, w, keywords):
    with refused(*keywords):
        analysis.System(lam, w)


# ---------------------------------------------------------------------------------- layers


@pytest.mark.parametrize(
    "options",
    [{}, {"bidirectional": True}, {"real": True}, {"kernel_length": 40}, {"cast": "prod"}],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_system_of_a_layer_is_before_the_cast(options, dtype):
    layer = DLR(3, 7, **options).to(dtype)
    system = analysis.system_of(layer)
    assert system.w.shape == (layer.W.shape[0], 7)
    assert not system.w.requires_grad
    kernel = system.kernel(40)
    cast = kernel.real * kernel.imag if layer.cast == "prod" else kernel.real
    close(cast, layer.double().kernel(40).detach())


@pytest.mark.parametrize(("channels", "states", "length"), SIZES)
def test_layer_of_a_system_convolves_with_the_real_part(channels, states, length):
    system = random_system(channels, states, with_zero=True)
    layer = analysis.layer_of(system)
    kernel = slow_kernel(system, length).real
    close(layer.kernel(length).detach(), kernel)
    u = torch.randn(2, length, channels, dtype=torch.float64)
    y = [sum(kernel[:, j] * u[:, i - j] for j in range(i + 1)) for i in range(length)]
    close(layer(u).detach(), torch.stack(y, dim=1), 1e-11)


def test_layer_of_and_system_of_are_inverse():
    system = random_system(4, 6, with_zero=True)
    random = torch.get_rng_state()
    back = analysis.system_of(analysis.layer_of(system))
    assert torch.equal(torch.get_rng_state(), random), "random numbers were drawn"
    close(back.lam, system.lam, 1e-15)
    assert torch.equal(back.w, system.w)
    assert back.lam[-1] == 0


def test_layer_of_a_bidirectional_system():
    layer = DLR(3, 4, bidirectional=True, project=False).double()
    torch.nn.init.zeros_(layer.D)
    again = analysis.layer_of(analysis.system_of(layer), bidirectional=True)
    u = torch.randn(2, 9, 3, dtype=torch.float64)
    close(again(u).detach(), layer(u).detach())
    with refused("bidirectional", "even", "3"):
        analysis.layer_of(random_system(3, 2), bidirectional=True)


def test_layer_of_a_growing_system_is_refused():
    grows = analysis.System(torch.tensor([0.5, 1.25j]).cdouble(), torch.ones(1, 2).cdouble())
    with refused("|lambda| <= 1", "1.25"):
        analysis.layer_of(grows)


def test_layer_of_forgives_rounding_of_the_unit_circle():
    phase = 2 * math.pi * torch.arange(37, dtype=torch.float64) / 37
    modulus = torch.full_like(phase, 1 + 4e-16)
    system = analysis.System(torch.polar(modulus, phase), torch.ones(1, 37).cdouble() / 37)
    assert system.lam.abs().max() > 1  # by rounding
    close(analysis.layer_of(system).kernel(75).detach(), slow_kernel(system, 75).real)


# ---------------------------------------------------------------------------------- products


@settings(max_examples=25, deadline=None)
@given(
    channels=st.integers(1, 3),
    m=st.integers(1, 5),
    n=st.integers(1, 5),
    length=st.integers(1, 20),
    with_zero=st.booleans(),
)
def test_kernel_of_a_kronecker_product_is_the_product_of_kernels(channels, m, n, length, with_zero):
    a, b = random_system(channels, m, 1), random_system(channels, n, 2, with_zero=with_zero)
    product = analysis.kronecker(a, b)
    assert product.w.shape == (channels, m * n)
    close(product.kernel(length), slow_kernel(a, length) * slow_kernel(b, length))


def test_kronecker_of_different_channels_is_refused():
    with refused("channels", "2 and 3"):
        analysis.kronecker(random_system(2, 2), random_system(3, 2))


@settings(max_examples=25, deadline=None)
@given(
    channels=st.integers(1, 3),
    states=st.integers(1, 5),
    length=st.integers(1, 20),
    with_zero=st.booleans(),
)
def test_dlr_prod_is_a_dlr(channels, states, length, with_zero):
    system = random_system(channels, states, with_zero=with_zero)
    kernel = slow_kernel(system, length)
    expected = kernel.real * kernel.imag
    small, full = analysis.prod_as_dlr(system), analysis.prod_as_dlr_full(system)
    assert small.lam.shape == (states * (states + 1) // 2,)
    assert full.lam.shape == (4 * states**2,)
    close(small.kernel(length).real, expected)
    close(full.kernel(length), torch.complex(expected, torch.zeros_like(expected)))


# ---------------------------------------------------------------------------------- linear RNNs


def slow_rnn_kernel(A, B, C, length):
    A, B, C = (x.to(torch.complex128) for x in (A, B.flatten(), torch.atleast_2d(C)))
    return torch.stack([C @ torch.linalg.matrix_power(A, k) @ B for k in range(length)], dim=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64, torch.complex128])
@pytest.mark.parametrize("states", [1, 2, 7, 16])
def test_a_linear_rnn_is_a_dlr(dtype, states):
    g = torch.Generator().manual_seed(states)
    A = torch.randn(states, states, generator=g, dtype=dtype) / (2 * states**0.5)
    B, C = (torch.randn(n, states, generator=g, dtype=dtype) for n in (1, 3))
    expected = slow_rnn_kernel(A, B, C, 12)
    for b in (B[0], B.T):
        system = analysis.from_linear_rnn(A, b, C)
        close(system.kernel(12), expected, 1e-11)
    close(analysis.from_linear_rnn(A, B[0], C[0]).kernel(12), expected[:1], 1e-11)


def test_a_rotation_stays_on_the_unit_circle():
    Q = torch.linalg.qr(torch.randn(9, 9, dtype=torch.float64)).Q
    B, C = torch.randn(2, 9, dtype=torch.float64)
    system = analysis.from_linear_rnn(Q, B, C)
    close(system.lam.abs(), torch.ones(9, dtype=torch.float64))
    expected = slow_rnn_kernel(Q, B, C, 200)
    close(analysis.layer_of(system).kernel(200).detach(), expected.real, 1e-11)


@pytest.mark.parametrize(
    "A", [torch.zeros(3, 3), torch.eye(3), torch.diag(torch.tensor([1.0, 1, 0]))]
)
def test_equal_eigenvalues_alone_are_no_obstacle(A):
    B, C = torch.randn(2, 3)
    close(analysis.from_linear_rnn(A, B, C).kernel(5), slow_rnn_kernel(A, B, C, 5))


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("eigenvalue", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("rotated", [False, True])
def test_a_defective_matrix_is_refused(size, eigenvalue, rotated):
    J = eigenvalue * torch.eye(size, dtype=torch.float64)
    J += torch.diag(torch.ones(size - 1, dtype=torch.float64), 1)
    if rotated:
        g = torch.Generator().manual_seed(size)
        Q = torch.linalg.qr(torch.randn(size, size, generator=g, dtype=torch.float64)).Q
        J = Q @ J @ Q.T
    with refused("diagonalised", "condition number", "at most 1e+07"):
        analysis.from_linear_rnn(J, torch.ones(size), torch.ones(size))


def test_a_nearly_defective_matrix_keeps_eight_digits_or_is_refused():
    B, C = torch.tensor([1.0, 2.0]), torch.tensor([3.0, -1.0])
    for gap in (1e-2, 1e-4, 1e-6, 1e-8, 1e-10):
        A = torch.tensor([[0.9, 1.0], [0.0, 0.9 - gap]], dtype=torch.float64)
        if gap > 3e-7:
            close(analysis.from_linear_rnn(A, B, C).kernel(30), slow_rnn_kernel(A, B, C, 30), 1e-8)
        else:
            with refused("condition number"):
                analysis.from_linear_rnn(A, B, C)


@pytest.mark.parametrize(
    ("A", "B", "C", "keywords"),
    [
        (torch.ones(2, 3), torch.ones(3), torch.ones(3), ("A", "square", "[2, 3]")),
        (torch.ones(()), torch.ones(1), torch.ones(1), ("A", "square", "[]")),
        (torch.eye(2), torch.ones(3), torch.ones(2), ("B", "[2] or [2, 1]", "[3]")),
        (torch.eye(2), torch.ones(1, 2), torch.ones(2), ("B", "[2] or [2, 1]", "[1, 2]")),
        (torch.eye(2), torch.ones(2), torch.ones(2, 3), ("C", "[H, 2]", "[2, 3]")),
        (torch.eye(2) * math.nan, torch.ones(2), torch.ones(2), ("A", "finite")),
        (torch.eye(2), torch.ones(2), torch.full((2,), math.inf), ("C", "finite")),
    ],
)
def test_bad_matrices_are_refused(A, B, C, keywords):
    with refused(*keywords):
        analysis.from_linear_rnn(A, B, C)
