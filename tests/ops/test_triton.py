"""LayerNorm, rotations and thin linear maps: PyTorch's on a CPU, kernels in Triton on a GPU."""

import sys
from pathlib import Path

import pytest
import torch
from kernels import answers, assert_same_bits, random
from support import DEVICE, assert_agree, assert_close, refused, relative_error, run_interpreted
from torch.nn import functional as F

from dlrnn import ops
from dlrnn.ops import dispatch, reference

norms, rotary, thin = (
    sys.modules[f"dlrnn.ops.{n}"] for n in ("layer_norm", "rotary", "thin_linear")
)


@pytest.mark.parametrize(
    "kernel", ["layer_norm", "rotate", "linear", "zero_order_hold", "dplr_kernel"]
)
def test_kernels_in_the_interpreter(kernel):
    pytest.importorskip("triton")
    here = Path(__file__).parent
    path = f"import sys; sys.path[:0] = [{str(here)!r}, {str(here.parent)!r}]\n"
    seeded = "import torch; torch.manual_seed(0)\n"
    run_interpreted(f"{path}{seeded}import interpreted\ninterpreted.{kernel}()")


# ---------------------------------------------------------------------------------- values


def plain_norm(x, added, weight, bias):
    return F.layer_norm(x + added, weight.shape, weight, bias)


def norm_of_sum(x, added, weight, bias):
    return ops.layer_norm(x, weight, bias, added=added)


def test_layer_norm_equals_pytorchs_of_the_sum():
    x, added, weight, bias = inputs = random((2, 3, 5), (2, 3, 5), (5,), (5,), grad=True)
    want = F.layer_norm(x + added, (5,), weight, bias, 1e-3)
    assert_agree(ops.layer_norm(x, weight, bias, eps=1e-3, added=added), want, inputs, 1e-12)
    want = F.layer_norm(x, (5,), weight, bias)
    assert_agree(ops.layer_norm(x, weight, bias), want, (x, weight, bias), 1e-12)
    with refused("added", "[2, 3, 5]"):
        ops.layer_norm(x, weight, bias, added=added[:1])


def test_differentiable_gradients_of_layer_norm_equal_pytorchs():
    """What second derivatives are made of, against PyTorch's own."""
    x, dout, weight, bias = random((4, 3, 5), (4, 3, 5), (5,), (5,), grad=True)
    want = torch.autograd.grad(F.layer_norm(x, (5,), weight, bias), (x, weight, bias), dout)
    d_total, both = norms._plain_backward(dout, x, weight, 1e-5)
    for have, exactly in zip((d_total, *both), want, strict=True):
        assert_close(have, exactly, 1e-12)


def test_linear_equals_pytorchs():
    x, weight, bias = random((2, 3, 4), (5, 4), (5,), dtype=torch.float32)
    assert_close(ops.linear(x, weight, bias), F.linear(x, weight, bias), 1e-7)
    assert_close(ops.linear(x, weight), F.linear(x, weight), 1e-7)


def positions_of(*rows):
    return torch.tensor(rows, device=DEVICE)


@pytest.mark.parametrize("far", [0, 2**20])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(("heads", "d"), [(1, 2), (3, 6), (4, 32)])
def test_rotations_equal_the_definition(heads, d, own, far):
    (x,) = random((2, 4, heads, d), grad=True)
    positions = positions_of([0, 1, 2, 3], [5, 6, 1000, 9])[: 2 if own else 1] + far
    # a frequency is known to its last bit or two, and a position multiplies what is wrong with it
    tolerance = (8 + int(positions.max())) * 2**-52
    assert_agree(ops.rotate(x, positions), reference.rotate(x, positions), (x,), tolerance)
    assert ops.rotate(x[:, :0], positions[:, :0]).shape == (2, 0, heads, d)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-7), (torch.bfloat16, 2**-8)])
def test_rotations_keep_the_dtype_and_are_exact_at_large_positions(dtype, tolerance):
    (x,), positions = random((1, 3, 2, 8), dtype=dtype), positions_of([2**20, 2**24, 2**30])
    have = ops.rotate(x, positions)
    assert have.dtype == dtype
    assert_close(have, reference.rotate(x, positions), tolerance)


# ---------------------------------------------------------------------------------- on a GPU


def norm_case(shape, adds):
    inputs = random(shape, shape, shape[-1:], shape[-1:], dtype=torch.float32)
    if adds:
        return norm_of_sum, plain_norm, inputs
    plain = lambda x, weight, bias: F.layer_norm(x, weight.shape, weight, bias)  # noqa: E731
    return ops.layer_norm, plain, [inputs[0], *inputs[2:]]


def linear_case(shape, columns):
    return (
        ops.linear,
        F.linear,
        random(shape, (columns, shape[-1]), (columns,), dtype=torch.float32),
    )


def rotate_case(shape, own, dtype):
    (wide,) = random((*shape[:2], shape[2] + 1, shape[3]), dtype=dtype)
    positions = torch.arange(shape[1], device=DEVICE).expand(shape[0] if own else 1, -1)

    def plain(x):
        if x.dtype == torch.float64:
            return reference.rotate(x, positions)
        with ops.use_backend("torch"):
            return ops.rotate(x, positions)

    return lambda x: ops.rotate(x, positions), plain, [wide[:, :, :-1]]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("make", "arguments"),
    [
        *(
            (norm_case, (shape, adds))
            for shape in [(16, 4096, 128), (3, 1000, 48), (2, 70, 1000), (5, 256)]
            for adds in (True, False)
        ),
        *(
            (linear_case, case)
            for case in [((16, 4096, 3), 128), ((16, 4096, 128), 8), ((7, 128), 1)]
        ),
        *((linear_case, case) for case in [((3, 1000, 16), 48), ((9, 1), 500)]),
        *(
            (rotate_case, (shape, own, dtype))
            for shape in [(16, 4096, 8, 32), (3, 1000, 2, 6), (1, 5, 3, 128)]
            for own in (False, True)
            for dtype in (torch.float32, torch.bfloat16, torch.float16)
        ),
    ],
)
def test_accuracy_on_a_gpu(make, arguments):
    op, plain, inputs = make(*arguments)
    grad = torch.randn_like(plain(*inputs))
    with dispatch.recorded() as choices:
        have = answers(op, inputs, grad)
    assert [choice.backend for choice in choices] == ["fused"]
    assert_same_bits(have, answers(op, inputs, grad))
    others, exact = answers(plain, inputs, grad), answers(plain, inputs, grad, torch.float64)
    for mine, other, right in zip(have, others, exact, strict=True):
        assert mine.dtype == other.dtype
        assert mine.is_contiguous()
        assert relative_error(mine, right) <= 2 * max(relative_error(other, right), 1e-7)


@pytest.mark.gpu
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
def test_a_thin_map_stays_fp32_under_autocast(given):
    x, weight, bias = random((9, 40, 3), (64, 3), (64,), dtype=torch.float32, grad=True)
    narrow = x.detach().to(given).requires_grad_()
    with torch.autocast("cuda", torch.bfloat16):
        y = ops.linear(narrow, weight, bias)
    assert y.dtype == torch.float32
    want = F.linear(narrow.float(), weight, bias)
    assert_close(y, want, 1e-6)
    for mine, other in zip(
        *(torch.autograd.grad(each.sum(), (narrow, weight, bias)) for each in (y, want)),
        strict=True,
    ):
        assert mine.dtype == other.dtype
        assert_close(mine, other, 1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "strided",
    [
        lambda wide: wide.transpose(0, 1),
        lambda wide: wide[:1].expand(40, 30, 64),
        lambda wide: wide[..., ::2],
    ],
    ids=["transposed", "expanded", "every other channel"],
)
def test_strides_of_layer_norm_on_a_gpu(strided):
    x = strided(torch.randn(40, 30, 64, device=DEVICE)).requires_grad_()
    weight, bias = torch.randn(2, 3 * x.shape[-1], device=DEVICE)[:, ::3]
    dout = torch.randn(x.shape[::-1], device=DEVICE).permute(2, 1, 0)
    have, want = ops.layer_norm(x, weight, bias), F.layer_norm(x, weight.shape, weight, bias)
    assert_close(have, want, 1e-6)
    assert_close(*(torch.autograd.grad(y, x, dout)[0] for y in (have, want)), 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("make", "arguments"),
    [
        (norm_case, ((2, 3, 16), True)),
        (linear_case, ((6, 3), 32)),
        (rotate_case, ((2, 3, 2, 4), False, torch.float32)),
    ],
)
def test_second_derivatives_on_a_gpu(make, arguments):
    op, plain, inputs = make(*arguments)

    def twice(function, dtype):
        own = [x.detach().to(dtype).requires_grad_() for x in inputs]
        (dx,) = torch.autograd.grad(function(*own).sin().sum(), own[0], create_graph=True)
        return torch.autograd.grad(dx.square().sum(), own)

    for mine, exact in zip(twice(op, torch.float32), twice(plain, torch.float64), strict=True):
        assert relative_error(mine, exact) < 1e-5


@pytest.mark.gpu
def test_custom_ops_are_sound_on_a_gpu():
    x, added, weight, bias = random(
        *((2, 3, 16), (2, 3, 16), (16,), (16,)), dtype=torch.float32, grad=True
    )
    for each in (added, None):
        torch.library.opcheck(norms._normed.library_op, (x, each, weight, bias, 1e-5))
    inputs = random((6, 3), (32, 3), (32,), dtype=torch.float32, grad=True)
    torch.library.opcheck(thin._linear.library_op, tuple(inputs))
    x, angles = random((2, 3, 2, 4), (1, 3, 2), dtype=torch.float32)
    turning = angles.cos(), angles.sin()
    torch.library.opcheck(rotary._turned.library_op, (x.requires_grad_(), *turning))
