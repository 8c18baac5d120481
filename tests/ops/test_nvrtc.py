"""Every CUDA kernel compiles with NVRTC, the compiler of users, without a GPU.

All for Hopper; portable ones for every architecture since compute capability 8.0.
"""

import ctypes

import pytest
import torch
from support import refused, tf32

from dlrnn.ops.cuda import (
    channel_vandermonde,
    convolution,
    long_convolution,
    nvrtc,
    output_stage,
    recurrence_step,
    vandermonde,
)
from dlrnn.ops.dlr_layer import layer_backward_op, layer_op


def convolve(length, right, left, dtype=torch.float32):
    """Forward and backward; rows up to 16384 have kernels of their own."""
    u, both = torch.zeros(1, length, 2, dtype=dtype), (torch.zeros(2, right), torch.zeros(2, left))
    kernels = convolution if length <= 2**convolution.LONGEST else long_convolution
    kernels.forward(u, *both)
    kernels.backward(u, u, *both)


def keep_spectra(length, right, left):
    u, both = torch.zeros(1, length, 2), (torch.zeros(2, right), torch.zeros(2, left))
    rows_y, *kept = convolution.forward_rows(u, *both, None, torch.bfloat16, True)
    convolution.backward_rows(rows_y, *kept, length, *both, None, torch.float32)


def mix(channels, columns, activation, in_rows, dtype=torch.float32):
    """The output stage, forward and backward."""
    shape = (1, channels, 128) if in_rows else (1, 128, channels)
    y, weight = torch.zeros(shape, dtype=dtype), torch.zeros(columns, channels)
    bias = torch.zeros(columns)
    out = output_stage.forward(y, 128, weight, bias, activation, in_rows=in_rows)
    output_stage.backward(out, y, weight, activation, in_rows=in_rows)


def multiply(length):
    W, log_lambda = torch.zeros(4, 8, 2), torch.zeros(8, 2, dtype=torch.float64)
    vandermonde.vandermonde(W, log_lambda, length)
    vandermonde.adjoint(torch.zeros(4, length), log_lambda)
    vandermonde.gradients(torch.zeros(4, length), W, log_lambda)


def multiply_channels(length):
    W, log_lambda = torch.zeros(1, 4, 8, 2), torch.zeros(4, 8, 2, dtype=torch.float64)
    channel_vandermonde.product(W, log_lambda, length)
    channel_vandermonde.gradients(torch.zeros(1, 4, length), W, log_lambda)


def run_layer(both, dtype):
    """The whole DLR layer as one op."""
    parameters = [torch.zeros(8), torch.zeros(8), torch.zeros(32 if both else 16, 8, 2)]
    parameters += [torch.zeros(16), torch.zeros(16, 16), torch.zeros(16)]
    out, *kept = layer_op(torch.zeros(1, 200, 16), *parameters, 100, "gelu", dtype, False)
    re, _, W, D, weight, _ = parameters
    layer_backward_op(out, *kept, re, W, D, weight, "gelu", torch.float32)


def step(states, own, dtype):
    """A step of the recurrence, of a DLR with and without its parameters, and with a window."""
    u, W, x = (
        torch.zeros(2, 3),
        torch.zeros(3, states, 2),
        torch.zeros(2, 3, states, 2, dtype=dtype),
    )
    log_lambda = torch.zeros(*((3,) if own else ()), states, 2, dtype=torch.float64)
    root = torch.zeros(states)
    recurrence_step.step(u, W, log_lambda, None, x, None)
    recurrence_step.step(u, W, root, root, x, u[0])
    recurrence_step.step(u, W, root, root, x, None, u, 9)
    oldest = torch.zeros(1, dtype=torch.int64)
    recurrence_step.windowed_step(u, W, log_lambda, None, x, None, torch.zeros(2, 9, 3), oldest)


@pytest.fixture
def capability(request):
    return getattr(request, "param", (9, 0))


@pytest.fixture
def compiled(monkeypatch, capability):
    """Kernels are compiled instead of loaded, and a launch does nothing."""
    try:
        nvrtc.library()
    except OSError as error:
        pytest.skip(f"{error}; pip install nvidia-cuda-nvrtc")
    found = {}

    def load(files, name, defines, shared_bytes, device):
        if (files, defines) not in found:
            source = "\n".join((nvrtc.SOURCES / file).read_text() for file in files)
            architecture = nvrtc.architecture(capability)
            options = [f"--gpu-architecture={architecture}", "--std=c++17"]
            options += [f"-D{key}={value}" for key, value in defines]
            found[files, defines] = nvrtc.compile_source(source, options)
        assert name.encode() in found[files, defines]
        return nvrtc.Kernel(ctypes.c_void_p(), shared_bytes, 0)

    monkeypatch.setattr(nvrtc, "load", load)
    monkeypatch.setattr(nvrtc, "capability", lambda _: capability)
    monkeypatch.setattr(nvrtc.Kernel, "__call__", lambda *_: None)
    return found


@pytest.mark.parametrize(
    ("run", "arguments"),
    [
        (convolve, (300, 300, 100)),
        (convolve, (2048, 2048, 0, torch.bfloat16)),
        (convolve, (4096, 4096, 0)),
        (convolve, (8192, 8192, 0)),
        (convolve, (16384, 8192, 8192)),
        (convolve, (16384, 16384, 0)),
        (convolve, (8192, 8192, 0, torch.float16)),
        (convolve, (16384, 16384, 0, torch.bfloat16)),
        (keep_spectra, (8192, 8192, 0)),
        (keep_spectra, (16384, 8192, 8192)),
        (mix, (128, 128, "gelu", True)),
        (mix, (32, 32, "gelu", False)),
        (mix, (144, 144, "identity", True)),
        (convolve, (20000, 20000, 0)),
        (convolve, (65536, 32768, 32768)),
        (convolve, (65536, 32768, 32768, torch.float16)),
        (convolve, (2**18, 2**18, 0)),
        (convolve, (2**20, 2**20, 0)),
        (mix, (128, 128, "gelu", True, torch.bfloat16)),
        (mix, (32, 48, "gelu", False, torch.bfloat16)),
        (mix, (64, 128, "identity", True, torch.float16)),
        (multiply, (4096,)),
        (multiply_channels, (4096,)),
        (run_layer, (True, torch.float32)),
        (run_layer, (False, torch.bfloat16)),
    ],
)
def test_kernels_compile(compiled, run, arguments):
    run(*arguments)
    assert compiled


STEPS = [(step, (512, False, torch.float32)), (step, (33, True, torch.float64))]
NOT_HOPPER = [  # which has kernels of its own for these
    (multiply, (4096,)),
    (multiply_channels, (4096,)),
    (mix, (128, 144, "gelu", True)),
    (mix, (48, 128, "gelu", False, torch.bfloat16)),
]
SPREAD = [  # plans of the convolutions, each for one architecture
    ((8, 0), keep_spectra, (16384, 8192, 8192)),
    ((8, 6), convolve, (8192, 8192, 0)),
    ((8, 9), convolve, (300, 300, 100, torch.bfloat16)),
    ((10, 0), convolve, (300, 300, 100)),
    ((12, 0), convolve, (2**20, 2**20, 0)),
]


@pytest.mark.parametrize(
    ("capability", "run", "arguments"),
    [
        *(
            (have, *each)
            for have in [(8, 0), (8, 6), (8, 9), (10, 0), (12, 0)]
            for each in STEPS + NOT_HOPPER
        ),
        *(((9, 0), *each) for each in STEPS),
        *SPREAD,
    ],
    indirect=["capability"],
)
def test_kernels_compile_for_every_architecture_that_they_support(compiled, run, arguments):
    run(*arguments)
    assert compiled


@pytest.mark.parametrize("given", ["80", "8.", "a.b", "12.0"])
def test_a_compute_capability_that_cannot_be_tested_here_is_refused(given, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setenv("DLRNN_COMPUTE_CAPABILITY", given)
    with refused("DLRNN_COMPUTE_CAPABILITY", "9.0", given):
        nvrtc.capability.__wrapped__(torch.device("cuda", 0))


def test_only_hopper_has_an_architecture_of_its_own():
    names = [nvrtc.architecture(have) for have in ((8, 0), (8, 9), (9, 0), (12, 0))]
    assert names == ["sm_80", "sm_89", "sm_90a", "sm_120"]


def test_kernels_compile_for_tf32(compiled):
    with tf32():
        multiply(4096)
        multiply_channels(4096)
    assert sum(("PRODUCTS", 1) in defines for _, defines in compiled) == 3


def test_a_cache_folder_that_cannot_be_written_is_ignored(compiled, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DLRNN_CACHE", str(tmp_path / "file" / "folder"))
    defines = ("STORAGE_BITS", 32), ("STORAGE_IS_BF16", 0), ("THREADS", 256)
    assert b"to_channel_major" in nvrtc.cubin(("device.cuh", "transpose.cu"), defines, "sm_90a")


def test_a_source_that_does_not_compile_raises(compiled):
    with refused("compile", "dlrnn", error=RuntimeError):
        nvrtc.compile_source("int main(", ["--gpu-architecture=sm_90a"])
