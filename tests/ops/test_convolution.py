from importlib import import_module

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernels import PlainRows
from support import DEVICE, assert_agree, assert_close, refused

from dlrnn import ops
from dlrnn.ops import dispatch, reference


def signals(batch, length, channels, right, left, dtype=torch.float64):
    u = torch.randn(batch, length, channels, dtype=dtype, device=DEVICE)
    kernels = (torch.randn(channels, size, dtype=dtype, device=DEVICE) for size in (right, left))
    return tuple(tensor.requires_grad_() for tensor in (u, *kernels))


@given(st.data())
def test_output_and_gradients_equal_the_reference(data):
    length = data.draw(st.integers(1, 40))
    right, left = data.draw(st.integers(1, length)), data.draw(st.integers(0, length))
    inputs = signals(
        data.draw(st.integers(0, 3)), length, data.draw(st.integers(1, 4)), right, left
    )
    expected = reference.convolution(*(t.cpu() for t in inputs))
    used = inputs if left else inputs[:2]
    assert_agree(ops.convolution(*inputs), expected, used, 1e-13, 1e-12)


@pytest.mark.parametrize("channels", [1, 33])
def test_blocks_of_channels_give_the_same(monkeypatch, channels):
    inputs = signals(2, 50, channels, 50, 31)
    y = ops.convolution(*inputs)

    def one_by_one(u, size):
        return [slice(h, h + 1) for h in range(u.shape[2])]

    monkeypatch.setattr(import_module("dlrnn.ops.convolution"), "_channel_blocks", one_by_one)
    assert_agree(ops.convolution(*inputs), y, inputs, 1e-14)


@pytest.fixture
def through_rows(monkeypatch):
    """`ops.convolution` as it is on a GPU, with plain PyTorch for the kernels."""
    module = import_module("dlrnn.ops.convolution")
    monkeypatch.setattr(module, "_has_rows", lambda *_: True)
    monkeypatch.setattr(module, "row_kernels", PlainRows)
    return lambda *inputs: module.convolve(*inputs, False, True, inputs[0].dtype, False)[0]


@pytest.mark.parametrize("sizes", [(2, 7, 3, 7, 4), (1, 1, 1, 1, 1), (2, 8, 2, 5, 0)])
def test_the_channel_major_layout_gives_the_same(through_rows, sizes):
    u, right, left = signals(*sizes)
    inputs = u, right, left, torch.randn(sizes[2], dtype=u.dtype, device=DEVICE, requires_grad=True)
    y, want = through_rows(*inputs), ops.convolution(*inputs)
    assert torch.equal(y, want)
    grad = torch.randn_like(y)
    for _ in range(2):  # what is kept for backward survives it
        have = torch.autograd.grad(y, inputs, grad, retain_graph=True)
        wanted = torch.autograd.grad(want, inputs, grad, retain_graph=True)
        for one, other in zip(have, wanted, strict=True):
            assert_close(one, other, 1e-13)
    torch.autograd.gradcheck(through_rows, inputs)
    torch.autograd.gradgradcheck(through_rows, inputs)


@pytest.mark.usefixtures("through_rows")
@pytest.mark.parametrize("to_rows", [False, True])
def test_ops_in_the_channel_major_layout_are_sound(to_rows, monkeypatch):
    """Shapes, strides and types that a compiled graph expects are those that come."""
    monkeypatch.setattr(PlainRows, "PADDING", 0.0)  # a comparison is part of it
    u, right, left = signals(2, 7, 3, 7, 4)
    module = import_module("dlrnn.ops.convolution")
    torch.library.opcheck(
        module.convolve.library_op, (u, right, left, None, to_rows, True, u.dtype, False)
    )
    dy, rows = torch.randn_like(u), PlainRows.to_rows(u.detach())
    kernels = right.detach(), left.detach()
    torch.library.opcheck(module._sequences_backward.library_op, (dy, rows, *kernels, None))
    arguments = PlainRows.to_rows(dy), rows, u.new_empty(0), *kernels, dy.new_ones(3), 7, dy.dtype
    torch.library.opcheck(module._rows_backward.library_op, arguments)


@pytest.mark.usefixtures("through_rows")
def test_ops_that_store_rows_in_16_bits_are_sound(monkeypatch):
    monkeypatch.setattr(PlainRows, "PADDING", 0.0)
    module = import_module("dlrnn.ops.convolution")
    u, right, left = (x.detach().float().requires_grad_() for x in signals(2, 7, 3, 7, 4))
    for keep in (False, True):
        arguments = u, right, left, None, True, True, torch.bfloat16, keep
        torch.library.opcheck(module.convolve.library_op, arguments)
    rows = PlainRows.to_rows(u.detach().bfloat16())
    for dtype in (torch.float32, torch.bfloat16):
        kernels = rows.new_empty(0), right.detach(), left.detach()
        arguments = rows.clone(), rows, *kernels, None, 7, dtype
        torch.library.opcheck(module._rows_backward.library_op, arguments)


@pytest.mark.parametrize("has_rows", [False, True])
def test_convolve_casts_u_and_its_gradient(has_rows, monkeypatch):
    module = import_module("dlrnn.ops.convolution")
    monkeypatch.setattr(module, "_has_rows", lambda *_: has_rows)
    monkeypatch.setattr(module, "row_kernels", PlainRows)
    u, right, left = (x.detach().float().requires_grad_() for x in signals(2, 7, 3, 7, 4))
    y, _, _ = module.convolve(u, right, left, None, has_rows, True, torch.bfloat16, True)
    half = u.detach().bfloat16().requires_grad_()
    want = ops.convolution(half, right, left)
    wanted = torch.autograd.grad(want, (half, right, left), torch.ones_like(want))
    y = module.as_sequences(y, 7) if has_rows else y
    have = torch.autograd.grad(y, (u, right, left), torch.ones_like(y), create_graph=True)
    assert y.dtype == torch.bfloat16
    assert all(x.dtype == torch.float32 for x in have)
    assert torch.equal(y, want)
    for one, other in zip(have, wanted, strict=True):
        assert torch.equal(one, other.float())
    (second,) = torch.autograd.grad(have[1].sum(), u)
    assert second.dtype == torch.float32


def test_the_backend_is_part_of_a_compiled_graph(monkeypatch):
    """Whether there are rows is asked outside the op, and asked again when it may have changed."""
    monkeypatch.setattr(dispatch, "_fused_is_there", lambda: True)
    prefers = dispatch.prefers_fused
    compiled = torch.compile(lambda x: x + prefers(), fullgraph=True, backend="eager")
    x = torch.zeros(())
    assert compiled(x) == 1
    with ops.use_backend("torch"):
        assert compiled(x) == 0
    assert compiled(x) == 1


def test_a_missing_left_kernel_is_not_part_of_the_graph():
    """Neither to the values nor, zero by zero, to the gradient of the right kernel."""
    u, right, _ = signals(2, 50, 3, 20, 0)
    y = ops.convolution(u, right)
    parents = [parent for parent, _ in y.grad_fn.next_functions if parent is not None]
    assert {type(parent).__name__ for parent in parents} == {"AccumulateGrad"}


def test_the_convolution_does_not_wrap_around():
    """An impulse at the far end must not come back at the near one."""
    u = torch.zeros(1, 63, 1, dtype=torch.float64, device=DEVICE)
    u[0, -1] = 1
    kernel = torch.ones(1, 63, dtype=torch.float64, device=DEVICE)
    assert ops.convolution(u, kernel)[0, :-1].abs().max() < 1e-14
    both = ops.convolution(u.flip(1), kernel[:, :1], kernel)
    assert both[0, 1:].abs().max() < 1e-14


def test_a_million_positions_in_fp32():
    """Error against float64, relative, also for the gradient of the kernel."""
    inputs = signals(1, 2**20, 1, 2**20, 0, torch.float32)
    double = tuple(t.detach().double().requires_grad_() for t in inputs)
    y, expected = ops.convolution(*inputs), ops.convolution(*double)
    assert_agree(y, expected, inputs[:2], 1e-6, truth=double[:2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernel_length", [3, 100])
def test_half_precision_is_summed_in_fp32(dtype, kernel_length):
    u = torch.randn(2, 100, 3, device=DEVICE).to(dtype)
    kernel = torch.randn(3, kernel_length, device=DEVICE)
    y = ops.convolution(u, kernel)
    assert y.dtype == dtype
    assert torch.equal(y, ops.convolution(u.float(), kernel).to(dtype))


@given(st.integers(1, 10**6))
def test_fast_length_has_small_factors(minimum):
    size = ops.fast_length(minimum)
    assert minimum <= size <= max(2, 1.2 * minimum)
    assert size % 2 == 0
    for factor in (2, 3, 5):
        while size % factor == 0:
            size //= factor
    assert size == 1


def test_fast_length_is_the_smallest():
    good = sorted(2**a * 3**b * 5**c for a in range(1, 12) for b in range(8) for c in range(6))
    for minimum in range(1, 2000):
        assert ops.fast_length(minimum) == next(size for size in good if size >= minimum)


def test_custom_op_is_sound():
    u, right, left = signals(2, 9, 3, 9, 4)
    skip = torch.randn(3, dtype=u.dtype, device=DEVICE, requires_grad=True)
    torch.library.opcheck(torch.ops.dlrnn.convolution.default, (u, right, left, skip))
    torch.library.opcheck(torch.ops.dlrnn.convolution.default, (u.detach(), right, left, None))


@pytest.mark.parametrize(
    ("right", "left", "keywords"),
    [
        (6, 0, ("right kernel", "6 entries", "5")),
        (5, 6, ("left kernel", "6 entries", "5")),
        (0, 5, ("right kernel", "at least one entry")),
    ],
)
def test_kernels_of_a_wrong_size_are_refused(right, left, keywords):
    u, right, left = signals(1, 5, 2, right, left)
    with refused(*keywords):
        ops.convolution(u, right, left)


U, K = torch.randn(1, 5, 2), torch.randn(2, 5)


@pytest.mark.parametrize(
    ("given", "keywords"),
    [
        ((U[..., :1], K), ("right kernel", "[1, K]", "[2, 5]")),
        ((U.mT, K), ("right kernel", "[5, K]", "[2, 5]")),
        ((U[0], K), ("u", "[B, L, H]", "[5, 2]")),
        ((U.tolist(), K), ("u", "torch tensor", "list")),
        ((U.long(), K), ("u", "float32", "bfloat16", "int64")),
        ((U + 0j, K), ("u", "float32", "bfloat16", "complex64")),
        ((U.double(), K), ("right kernel", "float64")),
        ((U, K[:1]), ("right kernel", "[2, K]", "[1, 5]")),
        ((U, K[None]), ("right kernel", "[H, K]", "[1, 2, 5]")),
        ((U, K[0]), ("right kernel", "[H, K]", "[5]")),
        ((U, None), ("right kernel", "torch tensor", "NoneType")),
        ((U, K, K[:1]), ("left kernel", "[2, K]", "[1, 5]")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value[0], str) else "",
)
def test_shapes_and_types_must_fit(given, keywords, unchecked):
    """Nothing is broadcast, cut off or cast."""
    with refused(*keywords):
        ops.convolution(*given)
