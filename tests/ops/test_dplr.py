"""The ops under S4, against dense matrices and loops over complex numbers."""

import cmath
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernels import answers, assert_same_bits, replayed
from support import DEVICE, assert_close

from dlrnn.ops import dplr, sections, use_backend
from dlrnn.ops.dplr import DPLR, dplr_kernel, legs
from dlrnn.ops.dplr_recurrence import dplr_advance, dplr_response, dplr_step
from dlrnn.ops.matrix_power import matrix_power, times_power


def random(*shape):
    return torch.randn(*shape, dtype=torch.float64, device=DEVICE)


def random_system(channels=2, pairs=3, outputs=1):
    """Eigenvalues close to the imaginary axis: what was read is hardly forgotten."""
    Lambda = torch.stack((-(10 ** -(1 + random(pairs).abs())), 5 * random(pairs)), dim=-1)
    C, dt = random(outputs, channels, pairs, 2), 10 ** -(1 + random(channels).abs())
    return DPLR(Lambda, random(pairs, 2) / 9, random(pairs, 2), C, dt)


def dense(system, h, output=0):
    """Abar, Bbar and C of all N states of a channel, complex, by inverses."""
    Lambda, P, B, C = (torch.view_as_complex(part.cpu().contiguous()) for part in system[:4])
    both = [torch.cat((half, half.conj())) for half in (Lambda, P, B, C[output, h])]
    Lambda, P, B, C = both
    A, identity = torch.diag(Lambda) - torch.outer(P, P.conj()), torch.eye(len(P))
    dt = system.dt[h].cpu()
    inverse = torch.linalg.inv(identity - dt / 2 * A)
    return inverse @ (identity + dt / 2 * A), dt * (inverse @ B), C


def kernel_by_loop(system, length):
    outputs, channels = system.C.shape[:2]
    kernel = torch.zeros(outputs, channels, length, dtype=torch.complex128)
    for r in range(outputs):
        for h in range(channels):
            A_bar, x, C = dense(system, h, r)
            for k in range(length):
                kernel[r, h, k] = C @ x
                x = A_bar @ x
    return kernel.real


@given(st.integers(1, 80), st.integers(1, 3), st.integers(1, 4), st.integers(1, 2))
def test_kernel_equals_the_dense_recurrence(length, channels, pairs, outputs):
    system = random_system(channels, pairs, outputs)
    assert_close(dplr_kernel(system, length), kernel_by_loop(system, length), 1e-12)


@pytest.mark.parametrize("length", [999, 1000])
def test_a_long_kernel_in_small_tiles(length, monkeypatch):
    system = random_system(3, 4)
    expected = dplr_kernel(system, length)
    assert_close(expected, kernel_by_loop(system, length), 1e-12)
    pieces = [(slice(h, h + 2), slice(f, f + 70)) for h in (0, 2) for f in range(0, 501, 70)]
    monkeypatch.setattr(sections, "_tiles", lambda a, length: pieces)
    assert_close(dplr_kernel(system, length), expected, 1e-14)


def test_groups_of_channels_give_the_same(monkeypatch):
    assert list(dplr._channels(3, 2**20)) == [slice(0, 1), slice(1, 2), slice(2, 3)]
    assert list(dplr._channels(5, 2**19)) == [slice(0, 2), slice(2, 4), slice(4, 5)]
    assert list(dplr._channels(5, 100)) == [slice(0, 5)]
    system = random_system(3, 4)
    expected = dplr_kernel(system, 50)
    monkeypatch.setattr(dplr, "_channels", lambda *_: [slice(0, 2), slice(2, 3)])
    assert_close(dplr_kernel(system, 50), expected, 1e-14)


@pytest.mark.parametrize("states", [2, 4, 64])
def test_legs_has_the_eigenvalues_of_hippos_matrix(states):
    """The eigenvalues of A and the Markov parameters `B^T A^k B` of the formula itself."""
    n = torch.arange(states, dtype=torch.float64)
    B = (2 * n + 1).sqrt()
    A = torch.zeros(states, states, dtype=torch.float64)
    for row in range(states):
        for column in range(row):
            A[row, column] = -math.sqrt((2 * row + 1) * (2 * column + 1))
        A[row, row] = -(row + 1)
    Lambda, P, transformed_B = (torch.view_as_complex(part) for part in legs(states))
    Lambda, P, V_B = (torch.cat((h, h.conj())) for h in (Lambda, P, transformed_B))
    similar = torch.diag(Lambda) - torch.outer(P, P.conj())
    assert_close((V_B.conj() @ V_B).real, B @ B, 1e-13)
    assert_close(torch.linalg.matrix_norm(similar), torch.linalg.matrix_norm(A), 1e-13)
    x, z = B, V_B
    for _ in range(6):
        x, z = A @ x / states**2, similar @ z / states**2
        assert_close((V_B.conj() @ z).real, B @ x, 1e-11)


def test_gradients_of_every_order():
    Lambda, P, B, C, dt = random_system()
    inputs = tuple(part.requires_grad_() for part in (Lambda, P, B, C, dt))
    for length in (1, 4, 5):
        assert torch.autograd.gradcheck(lambda *s, n=length: dplr_kernel(DPLR(*s), n), inputs)
    assert torch.autograd.gradgradcheck(lambda *s: dplr_kernel(DPLR(*s), 4), inputs)


def test_recurrence_equals_the_dense_one():
    system, u, state = random_system(), random(2, 150, 2), random(2, 2, 3, 2)
    x, outputs = state, []
    for u_t in u.unbind(1):
        y, x = dplr_step(u_t, system, x)
        outputs.append(y)
    for h in range(2):
        A_bar, B_bar, C = dense(system, h)
        z = torch.view_as_complex(state[:, h].cpu().contiguous())
        z = torch.cat((z, z.conj()), dim=-1)
        for t in range(150):
            z = z @ A_bar.T + u[:, t, h, None].cpu() * B_bar
            assert_close(outputs[t][:, h], (z @ C).real, 1e-10)
        assert_close(x[:, h], torch.view_as_real(z[:, :3]), 1e-10)
    assert_close(dplr_advance(u, system, state), x, 1e-10)
    nothing = torch.zeros_like(u)
    silent, quiet = [], state
    for u_t in nothing.unbind(1):
        y, quiet = dplr_step(u_t, system, quiet)
        silent.append(y)
    assert_close(dplr_response(system, state, 150), torch.stack(silent, dim=1), 1e-10)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("outputs", "channels", "pairs", "length"),
    [(1, 3, 32, 1000), (2, 128, 32, 4097), (2, 5, 40, 333), (1, 2, 1, 1), (1, 2, 8, 2**17)],
)
def test_accuracy_on_a_gpu(outputs, channels, pairs, length):
    """Kernel and gradients equal those of PyTorch and are deterministic, in a CUDA graph too."""
    Lambda, P, B = (part.to(DEVICE) for part in legs(2 * pairs))
    C, dt = random(outputs, channels, pairs, 2), 10 ** -(1 + 2 * torch.rand(channels).to(Lambda))
    system, grad = (Lambda, P, B, C, dt), random(outputs, channels, length)

    def found():
        return answers(lambda *parts: dplr_kernel(DPLR(*parts), length), system, grad)

    have = found()
    assert_same_bits(have, found())
    with use_backend("torch"):
        for one, wanted in zip(have, found(), strict=True):
            assert_close(one, wanted, 1e-9)
    assert_same_bits(have, replayed(found))


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("length", [1, 2, 7])
def test_section_sums_equal_the_definition(length, order):
    weights, a, b = random(2, 3, 4), -random(2, 4).abs() - 0.1, random(2, 4).abs()
    sums = sections.section_sums(weights, a, b, length, order).cpu()
    for h in range(2):
        for w in range(3):
            for k in range(length // 2 + 1):
                c, s = math.cos(math.pi * k / length), math.sin(math.pi * k / length)
                poles = [(p.item(), q.item()) for p, q in zip(a[h], b[h], strict=True)]
                terms = [
                    weights[h, w, n].item() / (q * c * c - s * s - 2j * s * c * p) ** order
                    for n, (p, q) in enumerate(poles)
                ]
                assert cmath.isclose(complex(*sums[h, w, k]), sum(terms), rel_tol=1e-11)


def test_section_adjoint_is_the_adjoint():
    weights, a, b = random(2, 3, 4), -random(2, 4).abs(), random(2, 4).abs()
    values = random(2, 3, 5, 2)
    left = (sections.section_sums(weights, a, b, 9, 1) * values).sum()
    right = (weights * sections.section_adjoint(values, a, b, 9, 1)).sum()
    assert_close(left, right, 1e-12)


@pytest.mark.parametrize("length", [1, 2, 5, 6])
def test_the_transforms_are_adjoint(length):
    kernel, spectrum = random(2, length), random(2, length // 2 + 1, 2)
    left = (sections.to_kernel(spectrum, length) * kernel).sum()
    assert_close(left, (spectrum * sections.to_spectrum(kernel)).sum(), 1e-12)


@pytest.mark.parametrize("n", [1, 2, 7, 12])
def test_matrix_power_equals_repeated_products(n):
    step = random(2, 3, 3).requires_grad_()
    expected = torch.eye(3, dtype=torch.float64, device=DEVICE).expand(2, 3, 3)
    for _ in range(n):
        expected = expected @ step
    assert_close(matrix_power(step, n), expected, 1e-13)
    rows = random(2, 2, 3)
    assert_close(times_power(rows, step, n), rows @ expected, 1e-13)
    grad = torch.randn_like(step)
    have, want = (torch.autograd.grad(p, step, grad)[0] for p in (matrix_power(step, n), expected))
    assert_close(have, want, 1e-12)
    assert torch.autograd.gradgradcheck(lambda s: matrix_power(s / 2, n), step)


def test_custom_ops_are_sound():
    step, change = random(2, 3, 3).requires_grad_(), random(2, 3, 3).requires_grad_()
    weights, values = random(2, 3, 4).requires_grad_(), random(2, 3, 5, 2).requires_grad_()
    a, b = (-random(2, 4).abs()).requires_grad_(), random(2, 4).abs().requires_grad_()
    spectrum, kernel = random(2, 5, 2).requires_grad_(), random(2, 9).requires_grad_()
    for op, arguments in (
        (matrix_power, (step, 1)),
        (matrix_power, (step, 5)),
        (torch.ops.dlrnn.matrix_power_slope.default, (step, change, 5)),
        (sections.section_sums, (weights, a, b, 9, 1)),
        (sections.section_adjoint, (values, a, b, 9, 2)),
        (sections.to_kernel, (spectrum, 9)),
        (sections.to_spectrum, (kernel,)),
    ):
        torch.library.opcheck(getattr(op, "library_op", op), arguments)
