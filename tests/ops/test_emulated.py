"""The CUDA kernels of convolutions on a CPU: numbers, bounds, barriers.

The epilogue's kernels are in test_mixing.py, those of Vandermonde products in
test_emulated_vandermonde.py. Every kernel runs on small sizes and three multiprocessors, so that
blocks have several tiles and use a stage again.
"""

import sys
from functools import partial

import pytest
import torch
from emulator import Kernel, compiled
from kernels import (
    assert_16_bit_inputs_are_right,
    assert_twice_the_error_of_plain_pytorch,
    convolution_inputs,
)
from support import relative_error

from dlrnn.ops.cuda import convolution, long_convolution, nvrtc

pytestmark = pytest.mark.usefixtures("emulated")


inputs = partial(convolution_inputs, device="cpu")


@pytest.mark.parametrize(
    ("kernels", "size"),
    [
        (convolution, (5, 300, 5, 300, 120)),  # one residue
        (convolution, (3, 4095, 2, 4095, 7)),
        (convolution, (2, 8191, 2, 8191, 1)),  # two
        (convolution, (3, 9000, 1, 20, 9000)),  # three; the right kernel fits in one segment
        (convolution, (2, 16384, 1, 16384, 0)),  # four
        (convolution, (1, 16384, 1, 9000, 13000)),
        (long_convolution, (1, 20000, 3, 20000, 100)),
        (long_convolution, (1, 65536, 2, 32768, 32768)),
    ],
    ids=lambda each: str(getattr(each, "__name__", each)).removeprefix("dlrnn.ops.cuda."),
)
def test_convolutions(kernels, size):
    assert_twice_the_error_of_plain_pytorch(kernels, inputs(*size))


@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        ((2, 300, 3, 200, 9), torch.bfloat16),
        ((2, 300, 3, 200, 9), torch.float16),
        ((3, 4095, 2, 4095, 7), torch.bfloat16),
        ((2, 8191, 2, 8191, 1), torch.bfloat16),
        ((3, 9001, 1, 20, 7000), torch.bfloat16),
        ((2, 16383, 1, 16383, 0), torch.bfloat16),
    ],
    ids=str,
)
def test_16_bit_inputs_are_as_accurate_as_their_type(size, dtype):
    assert_16_bit_inputs_are_right(convolution, *inputs(*size), dtype)


@pytest.fixture
def older(monkeypatch):
    """An emulated GPU with the least shared memory, and without bulk copies."""
    monkeypatch.setattr(nvrtc, "capability", lambda _: (8, 6))


@pytest.mark.parametrize(
    ("kernels", "size", "dtype"),
    [
        (convolution, (7, 300, 9, 300, 120), torch.float32),
        (convolution, (2, 8191, 2, 8191, 1), torch.bfloat16),
        (convolution, (5, 9001, 1, 20, 7000), torch.bfloat16),
        (convolution, (4, 16383, 1, 16383, 0), torch.float16),
        (long_convolution, (2, 20000, 1, 20000, 100), torch.float32),
    ],
    ids=lambda each: str(getattr(each, "__name__", each)).removeprefix("dlrnn.ops.cuda."),
)
def test_convolutions_of_older_gpus(kernels, size, dtype, older):
    if dtype == torch.float32:
        assert_twice_the_error_of_plain_pytorch(kernels, inputs(*size))
    else:
        assert_16_bit_inputs_are_right(kernels, *inputs(*size), dtype)


def test_kept_spectra_give_the_gradients_on_older_gpus(older):
    test_kept_spectra_give_the_gradients((7, 300, 9, 300, 120))


def test_16_bit_rows_of_fp32_sequences():
    """u is rounded once, and du comes in its dtype."""
    u, dy, right, left = inputs(2, 303, 35, 303, 5)
    narrow, half = u.bfloat16(), torch.bfloat16
    rows = [convolution.forward_rows(x, right, left, None, half) for x in (u, narrow)]
    for one, other in zip(*(each[:2] for each in rows), strict=True):
        assert one.dtype == half
        assert torch.equal(one[..., :303], other[..., :303])
    rows_dy, rows_u = convolution.to_rows(dy.bfloat16()), rows[0][1]
    given = rows_u, rows_u[:0], 303, right, left, None
    wide, *_ = convolution.backward_rows(rows_dy.clone(), *given, torch.float32)
    want, *_ = convolution.backward_rows(rows_dy, *given, half)
    assert torch.equal(wide, want.float())


@pytest.mark.parametrize(
    "size",
    [
        (5, 300, 5, 300, 120),
        (5, 4095, 2, 4095, 7),
        (4, 8191, 1, 8191, 1),
        (7, 9001, 1, 20, 7000),
        (5, 16383, 1, 16383, 0),
    ],
    ids=str,
)
def test_kept_spectra_give_the_gradients(size):
    """y and du are the same; the gradient of the convolution's kernels has the error of bf16."""
    u, dy, right, left = inputs(*size)
    length, half = size[1], torch.bfloat16
    rows_y, rows_u, kept = convolution.forward_rows(u, right, left, None, half, True)
    want_y, *_ = convolution.forward_rows(u, right, left, None, half)
    assert torch.equal(rows_y[..., :length], want_y[..., :length])
    found = [
        convolution.backward_rows(
            convolution.to_rows(dy.bfloat16()), rows_u, spectra, length, right, left, None, half
        )
        for spectra in (kept, kept[:0])
    ]
    (du, *have), (want, *wanted) = found
    assert torch.equal(du, want)
    assert relative_error(torch.cat(have, 1), torch.cat(wanted, 1)) < 2**-9


def test_nan_of_16_bits_reaches_its_outputs_only():
    u, dy, right, left = inputs(2, 301, 3, 301, 0)
    u[0, 3, 2] = dy[1, 300, 1] = float("nan")
    u, dy = u.bfloat16(), dy.bfloat16()
    y = convolution.forward(u, right, left)
    du, d_right, _ = convolution.backward(dy, u, right, left)
    assert y[0, 3:, 2].isnan().all()
    assert du[1, :, 1].isnan().all()
    assert d_right[1:].isnan().all()
    assert y[1].isfinite().all()
    assert du[0].isfinite().all()
    assert d_right[0].isfinite().all()


def test_the_channel_major_layout_gives_the_same(monkeypatch):
    """`ops.convolution` as it is on a GPU, to the second derivatives; rows may be kept strided."""
    module = sys.modules["dlrnn.ops.convolution"]
    u, dy, right, left = inputs(2, 301, 3, 301, 20)
    arguments = [x.requires_grad_() for x in (u, right, left, torch.randn(3))]
    exact = [x.detach().double().requires_grad_() for x in arguments]
    wanted = derivatives(module.convolution, exact, dy.double())
    monkeypatch.setattr(module, "_has_rows", lambda *_: True)
    strided = torch.autograd.graph.saved_tensors_hooks(
        lambda x: x.detach().transpose(0, -1).contiguous(), lambda x: x.transpose(0, -1)
    )
    for to_rows in (False, True):

        def function(*each, to_rows=to_rows):
            y, _, _ = module.convolve(*each, to_rows, True, torch.float32, False)
            return module.as_sequences(y, 301) if to_rows else y

        have = derivatives(function, arguments, dy)
        with strided:
            have += torch.autograd.grad(function(*arguments), arguments, dy)
        for one, other in zip(have, wanted + wanted[1:5], strict=True):
            assert relative_error(one, other) < 2e-6


def derivatives(function, arguments, dy):
    y = function(*arguments)
    first = torch.autograd.grad(y, arguments, dy, retain_graph=True)
    u, right = torch.autograd.grad(y, arguments[:2], dy, create_graph=True)
    return [y, *first, *torch.autograd.grad(u.square().sum() + right.square().sum(), arguments)]


BROKEN = """
extern "C" __global__ void __launch_bounds__(64) reads_beyond(const float* x, float* y) {
  y[threadIdx.x] = x[threadIdx.x + 1];
}
extern "C" __global__ void __launch_bounds__(64) writes_beyond(const float* x, float* y) {
  y[threadIdx.x + 4] = x[threadIdx.x];
}
extern "C" __global__ void __launch_bounds__(64) uses_too_much(const float* x, float* y) {
  extern __shared__ __align__(16) float memory[];
  memory[threadIdx.x] = x[threadIdx.x];
}
extern "C" __global__ void __launch_bounds__(64) does_not_meet(const float* x, float* y) {
  if (threadIdx.x < 63) __syncthreads();
}
extern "C" __global__ void __launch_bounds__(64) does_not_wait(const float* x, float* y) {
  extern __shared__ __align__(16) float memory[];
  Mbarrier* barrier = (Mbarrier*)(memory + 16);
  if (threadIdx.x == 0) mbarrier_init(barrier, 1), mbarrier_expect_bytes(barrier, 64);
  if (threadIdx.x == 0) copy_to_shared(memory, x, 64, barrier);
  __syncthreads();
  y[threadIdx.x] = memory[threadIdx.x % 16];
}
"""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("reads_beyond", "reads or writes beyond"),
        ("writes_beyond", "reads or writes beyond"),
        ("uses_too_much", "reads or writes beyond"),
        ("does_not_meet", "wait for each other"),
    ],
)
def test_a_broken_kernel_is_detected(name, message, emulated):
    kernel = Kernel(compiled(BROKEN, (), emulated), name, 128)
    with pytest.raises(AssertionError, match=message):
        kernel(1, 64, torch.randn(64), torch.randn(64))


def test_a_copy_that_is_not_awaited_has_not_arrived(emulated):
    y = torch.zeros(64)
    Kernel(compiled(BROKEN, (), emulated), "does_not_wait", 128)(1, 64, torch.ones(64), y)
    assert y.isnan().all()
