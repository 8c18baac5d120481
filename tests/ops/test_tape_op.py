"""The tape: the chunked form against the loop over positions, and what its accuracy rests on."""

import math

import pytest
import torch
from kernels import random
from support import DEVICE, assert_agree, assert_close

from dlrnn import ops
from dlrnn.ops import reference
from dlrnn.ops.tape import CHUNK, features

SIZES = [
    # B, L, heads, groups, width, N
    (2, 1, 1, 1, 1, 1),
    (2, CHUNK, 2, 1, 3, 4),
    (1, CHUNK + 1, 3, 2, 1, 7),
    (2, 2 * CHUNK + 5, 2, 3, 2, 17),
    (0, 5, 2, 2, 2, 3),
]


def inputs(size, *, turns=1.0, dtype=torch.float64):
    """v, angles of up to so many turns, c and a state."""
    batch, length, heads, groups, width, harmonics = size
    v, c, state = random(
        (batch, length, heads, groups * width),
        (heads, groups, harmonics, 2),
        (batch, heads, groups * width, harmonics, 2),
        dtype=dtype,
    )
    write, read = random((batch, length, heads), (batch, length, heads))
    return [t.requires_grad_() for t in (v, turns * write, turns * read, c, state)]


def outputs(function, given):
    """y and the state after it, as one tensor."""
    return torch.cat([t.double().flatten() for t in function(*given)])


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_chunked_form_equals_the_loop(size):
    given = inputs(size)
    cpu = [t.cpu() for t in given]
    assert_agree(outputs(ops.tape, given), outputs(reference.tape, cpu), given, 1e-12)
    alone = given[:4]
    assert_agree(ops.tape(*alone)[0], reference.tape(*cpu[:4])[0], alone, 1e-12)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_one_clock_of_all_sequences_and_heads_is_the_same_for_each(size):
    v, _, read, c, state = inputs(size)
    clock = torch.rand(1, size[1], 1, dtype=torch.float64, device=DEVICE)
    for given in (clock, clock.clone().requires_grad_()):
        each = clock.expand(read.shape).clone().requires_grad_()
        shared, own = (outputs(ops.tape, (v, w, read, c, state)) for w in (given, each))
        assert_agree(shared, own, (v, read, c, state), 1e-12)
        if given.requires_grad:
            gradients = (
                torch.autograd.grad(outputs(ops.tape, (v, w, read, c, state)).square().sum(), w)[0]
                for w in (given, each)
            )
            assert_close(next(gradients), next(gradients).sum((0, 2), keepdim=True), 1e-12)


@pytest.mark.parametrize("size", [(2, 67, 2, 2, 2, 33), (1, 2**14, 1, 1, 1, 65)], ids=str)
def test_fp32_is_close_to_float64(size):
    given = inputs(size, turns=100.0, dtype=torch.float32)
    exact = [t.detach().double().requires_grad_() for t in given]
    value, reference_value = outputs(ops.tape, given), outputs(ops.tape, exact)
    assert_agree(value, reference_value, given, 1e-5, truth=exact)


def test_gradients_by_finite_differences():
    given = inputs((1, 4, 2, 2, 1, 3))
    assert torch.autograd.gradcheck(ops.tape, given)


def test_second_derivatives_by_finite_differences():
    given = inputs((1, 3, 1, 2, 1, 2))
    assert torch.autograd.gradgradcheck(ops.tape, given)


def test_second_derivatives_where_one_angle_is_made_of_the_other():
    v, write, _, c, _ = inputs((1, 4, 1, 1, 1, 3))
    assert torch.autograd.gradgradcheck(
        lambda w: ops.tape(v.detach(), w, 2 * w, c.detach())[0], (write,)
    )


def test_features_of_large_angles_are_exact():
    """At a million turns and the harmonic 2^14; the whole turns change nothing."""
    turns = torch.tensor([2.0**20 + 0.375, -(2.0**20) + 2.0**-30], dtype=torch.float64)
    n = torch.arange(2**14 + 1, dtype=torch.float64)
    phase = 2 * math.pi * torch.stack((n * 0.375 % 1, n * 2.0**-30))
    expected = torch.polar(torch.ones_like(phase), phase)
    for dtype, tolerance in ((torch.float64, 1e-14), (torch.float32, 3e-7)):
        made = features(turns.to(DEVICE), 2**14 + 1, dtype)
        assert_close(torch.view_as_real(made), torch.view_as_real(expected), tolerance)


def test_no_tensor_of_all_positions_and_harmonics_is_kept():
    """What is saved for the backward pass: inputs, and states of one position."""
    given = inputs((1, 40 * CHUNK, 1, 1, 1, 64), dtype=torch.float32)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        ops.tape(*given)
    assert saved
    assert sum(t.numel() for t in saved) <= sum(t.numel() for t in given) + given[4].numel()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["v", "write", "read"])
def test_what_is_not_finite_reaches_no_earlier_position(name, bad):
    """Neither outputs nor, through the backward pass, gradients of the outputs before."""
    at, place = CHUNK + 3, ("v", "write", "read").index(name)
    given = inputs((2, 2 * CHUNK + 5, 2, 1, 2, 5))
    before, _ = ops.tape(*(t[:, :at] for t in given[:3]), *given[3:])
    spoiled = [t.detach().clone().requires_grad_() for t in given]
    with torch.no_grad():
        spoiled[place][0, at, 0] = bad
    y, after = ops.tape(*spoiled)
    reached = torch.zeros_like(y, dtype=torch.bool)
    reached[0, at : at + 1 if name == "read" else None, 0] = True
    assert torch.equal(y.isnan(), reached)
    assert after[0, 0].isnan().all() == (name != "read")
    assert not after[1].isnan().any()
    assert not after[0, 1].isnan().any()
    assert_agree(y[:, :at], before, spoiled, 1e-12, truth=given)


@pytest.mark.usefixtures("unchecked")
def test_arguments_that_do_not_fit_are_refused():
    v, write, read, c, state = inputs((2, 5, 2, 2, 2, 3))
    for wrong, keyword in (
        ((v, write[:, :4], read, c), "write"),
        ((v, write, read.float(), c), "float64"),
        ((v, write, read, c[:, :, :, :1]), "c must"),
        ((v[..., :3], write, read, c), "multiple"),
        ((v, write, read, c, state[:1]), "state"),
    ):
        with pytest.raises(ValueError, match=keyword):
            ops.tape(*wrong)
