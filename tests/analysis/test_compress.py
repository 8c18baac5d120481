import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import in_steps, refused

from dlrnn.analysis import System, compress, layer_of, prod_as_dlr, system_of
from dlrnn.nn import DLR, S4D


def fresh(channels, states, seed=0, **options):
    torch.manual_seed(seed)
    return DLR(channels, states, **options)


def kernel(layer, length):
    return layer.kernel(length).detach()


def same(actual, expected, tolerance=1e-9):
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


def complex128(*values):
    return torch.tensor(values, dtype=torch.complex128)


# ---------------------------------------------------------------------------------- the bound


def slow_gain(a, b, frequencies=2000, length=4000):
    """max_omega |G - G'| from long kernels, frequency by frequency; b may be missing."""
    difference = kernel(a, length) - (0 if b is None else kernel(b, length))
    omega = torch.linspace(0, math.pi, frequencies, dtype=torch.float64)
    turns = torch.exp(-1j * omega[:, None] * torch.arange(length))
    return torch.linalg.norm(turns @ difference.T.to(turns.dtype), dim=1).max().item()


def test_error_is_measured_right_and_lies_below_a_bound_that_says_something():
    layer = fresh(8, 64, dt_min=2e-2).double()
    for d_state in (60, 48, 32, 16, 4, 1):
        small = compress(layer, d_state)
        assert small.layer.d_state <= d_state
        assert slow_gain(layer, small.layer) == pytest.approx(small.error, rel=0.02)
        assert small.error <= small.bound <= 100 * small.error
        assert small.error <= 1.01 * slow_gain(layer, None)


@settings(max_examples=25, deadline=None)
@given(
    channels=st.integers(1, 4),
    states=st.integers(1, 12),
    fraction=st.floats(0, 1),
    real=st.booleans(),
    seed=st.integers(0, 99),
)
def test_bound_is_twice_the_singular_values_left_out(channels, states, fraction, real, seed):
    layer = fresh(channels, states, seed, real=real).double()
    d_state = max(1, round(fraction * states))
    small = compress(layer, d_state)
    sigma = small.singular_values
    assert 1 <= small.layer.d_state <= d_state
    assert small.error <= small.bound + 1e-9 * sigma[0]
    # a state holds one or two modes
    orders = range(1 if real else d_state, 2 * states + 1)
    assert small.bound in [2 * sigma[order:].sum().item() for order in orders]
    assert (sigma.diff() <= 0).all()


@pytest.mark.parametrize("bidirectional", [False, True])
def test_no_input_gives_a_larger_difference_than_the_bound(bidirectional):
    layer = fresh(3, 16, bidirectional=bidirectional, project=False).double()
    small = compress(layer, 9)
    bound = small.bound * (math.sqrt(2) if bidirectional else 1)
    u = torch.randn(2, 500, 3, dtype=torch.float64)
    difference = (layer(u) - small.layer(u)).detach()
    for b in range(2):
        for h in range(3):
            assert 0 < difference[b, :, h].norm() <= bound * u[b, :, h].norm()


def test_memory_close_to_endless():
    """|lambda| = 1 - 1e-7: resonances between the points of a uniform grid."""
    modulus = torch.tensor([1 - 1e-7, 1 - 3e-7, 1 - 1e-6, 0.9], dtype=torch.float64)
    lam = torch.polar(modulus, torch.tensor([0.1, 0.7, 2.0, 3.0], dtype=torch.float64))
    small = compress(layer_of(System(lam, complex128(1, 1e-3, 1e-3, 1e-3)[None])), 1)
    # What is left out: the second mode alone peaks at |w| / (2 (1 - |lambda|)) = 1.7e3.
    assert small.error == pytest.approx(1e-3 / 3e-7 / 2, rel=0.02)
    assert small.error <= small.bound
    assert abs(system_of(small.layer).lam.item()) == pytest.approx(1 - 1e-7, abs=1e-9)


# ---------------------------------------------------------------------------------- exactness


def padded(kind):
    """A layer of 6 states' worth of kernel in 15 states, and the 6 states."""
    g = torch.Generator().manual_seed(5)
    phase = torch.linspace(0.3, 2.8, 6, dtype=torch.float64)
    modulus = 1 - 10 ** (-1 - 2 * torch.rand(6, generator=g, dtype=torch.float64))
    true = System(torch.polar(modulus, phase), torch.randn(3, 6, generator=g).cdouble())
    more = torch.polar(
        0.3 + 0.06 * torch.arange(9).double(), 6 * torch.rand(9, generator=g).double()
    )
    part = torch.randn(3, 6, generator=g).cdouble()
    again = {
        "zero weight": ((true.lam, true.w), (more[:6], torch.zeros(3, 6))),
        "same lambda": ((true.lam, part), (true.lam, true.w - part)),
        # Re(w lambda^k) = Re(conj(w) conj(lambda)^k)
        "conjugates": ((true.lam, part), (true.lam.conj(), (true.w - part).conj())),
    }
    lam, w = zip(*again[kind], (more[6:], torch.zeros(3, 3)), strict=True)
    return layer_of(System(torch.cat(lam), torch.cat(w, dim=1))), layer_of(true)


@pytest.mark.parametrize("kind", ["zero weight", "same lambda", "conjugates"])
@pytest.mark.parametrize("d_state", [6, 10, 15])
def test_states_that_add_nothing_are_found(kind, d_state):
    layer, true = padded(kind)
    small = compress(layer, d_state)
    assert small.layer.d_state == 6
    assert small.error <= 1e-10 * small.singular_values[0]
    assert small.bound <= 1e-10 * small.singular_values[0]
    same(kernel(small.layer, 300), kernel(true, 300), 1e-10)
    found, expected = system_of(small.layer).lam, system_of(true).lam
    same(found[found.angle().argsort()], expected)
    assert compress(layer, 5).error > 1e-3  # one state too few


@pytest.mark.parametrize("options", [{}, {"bidirectional": True}, {"real": True}])
@pytest.mark.parametrize("states", [1, 2, 9, 32])
def test_full_size_is_near_exact(options, states):
    layer = fresh(2, states, **options).double()
    small = compress(layer, states)
    assert max(small.error, small.bound) <= 1e-9 * small.singular_values[0]
    same(kernel(small.layer, 200), kernel(layer, 200))


def test_where_no_state_can_be_spared_a_copy_comes_back():
    layer = fresh(4, 5)
    small = compress(layer, 5)
    assert small.bound == small.error == 0
    assert small.layer is not layer
    assert torch.equal(kernel(small.layer, 50), kernel(layer, 50))


def test_real_modes_count_as_one_state_each():
    lam = complex128(0.9, 0.5, -0.7, 0.3j)
    layer = layer_of(System(lam, torch.ones(1, 4).cdouble()))
    assert (compress(layer, 4).singular_values > 1e-10).sum() == 5  # 3 real modes and 1 pair
    extra = System(torch.cat((lam, lam)), torch.ones(1, 8).cdouble())
    small = compress(layer_of(extra), 8)
    assert small.layer.d_state == 4
    found = sorted(system_of(small.layer).lam.real.tolist())
    assert found == pytest.approx([-0.7, 0, 0.5, 0.9], abs=1e-9)


def test_a_lambda_of_zero_and_weights_of_zero():
    lam = complex128(0, 0, 0.5)
    small = compress(layer_of(System(lam, torch.ones(1, 3).cdouble())), 3)
    assert small.layer.d_state == 2
    expected = 0.5 ** torch.arange(6, dtype=torch.float64)
    expected[0] = 3
    same(kernel(small.layer, 6)[0], expected, 1e-12)
    nothing = compress(layer_of(System(lam, torch.zeros(2, 3).cdouble())), 2)
    assert nothing.layer.d_state == 1
    assert nothing.error == nothing.bound == 0
    assert not kernel(nothing.layer, 6).any()


# ---------------------------------------------------------------------------------- the layer


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"glu": True, "activation": "silu", "dropout": 0.25, "dt_min": 0.01, "dt_max": 0.1},
        {"project": False, "kernel_length": 11},
        {"bidirectional": True, "kernel_length": 7},
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_everything_but_the_modes_stays(options, dtype):
    layer = fresh(3, 12, **options).to(dtype).eval()
    small = compress(layer, 7).layer
    names = ("glu", "activation", "project", "kernel_length", "bidirectional", "dt_min", "dt_max")
    assert [getattr(small, name) for name in names] == [getattr(layer, name) for name in names]
    assert str(small.dropout) == str(layer.dropout)
    assert small.cast == "real"
    assert not small.training
    assert {p.dtype for p in small.parameters()} == {dtype}
    assert torch.equal(small.D, layer.D)
    if layer.out is not None:
        assert torch.equal(small.out.weight, layer.out.weight)
        assert small.out.weight is not layer.out.weight
    assert small.W.shape == (layer.W.shape[0], small.d_state, 2)
    assert kernel(small, 20).shape == kernel(layer, 20).shape


@pytest.mark.parametrize("kernel_length", [None, 9])
def test_streaming_is_the_whole(kernel_length):
    layer = fresh(3, 20, kernel_length=kernel_length).double()
    small = compress(layer, 11).layer
    u = torch.randn(2, 40, 3, dtype=torch.float64)
    with torch.no_grad():
        same(in_steps(small, u)[0], small(u), 1e-12)


def test_in_single_precision_little_is_added_to_the_error():
    layer = fresh(8, 64)
    small = compress(layer, 63)
    difference = kernel(layer.double(), 1000) - kernel(small.layer.double(), 1000)
    assert difference.abs().max() < 1e-4 * kernel(layer, 1000).abs().max()


def test_a_real_layer_comes_back_complex_and_close():
    layer = fresh(4, 64, real=True).double()
    small = compress(layer, 16)
    assert not small.layer.real
    assert small.layer.d_state == 16
    assert small.error < 1e-5 * small.singular_values[0]
    same(kernel(small.layer, 500), kernel(layer, 500), 1e-4)


def test_dlr_prod_compresses_after_conversion():
    prod = fresh(2, 6, cast="prod").double()
    layer = layer_of(prod_as_dlr(system_of(prod)))  # 21 states
    small = compress(layer, 20)
    assert small.error <= small.bound + 1e-9 * small.singular_values[0]
    same(kernel(small.layer, 100), kernel(prod, 100), small.bound + 1e-9)


def test_compress_leaves_the_layer_and_the_random_numbers_alone():
    layer = fresh(2, 8)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    random = torch.get_rng_state()
    compress(layer, 4)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())


def test_what_cannot_be_compressed_is_refused(unchecked):
    with refused("cast='real'", "prod_as_dlr"):
        compress(fresh(2, 4, cast="prod"), 2)
    for d_state in (0, -1, 5, 2.5, "4"):
        with refused("d_state", "between 1 and", "4", repr(d_state)):
            compress(fresh(2, 4), d_state)
    with refused("compress", "DLR layer", "S4D"):
        compress(S4D(4, 8), 2)
    layer = fresh(2, 4)
    layer.log_lambda_re.data[1] = 0
    with refused("1 of the 4 states", "|lambda| = 1"):
        compress(layer, 2)
    layer.W.data[0, 0, 0] = torch.nan
    with refused("W", "nan", "[0, 0, 0]"):
        compress(layer, 2)
