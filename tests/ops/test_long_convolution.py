"""The factors of the long convolution's FFT, and its kernels on a GPU."""

import math

import pytest
import torch
from convolutions import (
    assert_16_bit_inputs_are_right,
    assert_twice_the_error_of_plain_pytorch,
    plain_torch,
    results,
)
from support import DEVICE, relative_error

from dlrnn.ops.cuda import long_convolution
from dlrnn.ops.cuda.long_convolution import (
    Factors,
    column_tables,
    factors_for,
    smallest_factors,
    tile_for,
)

MULTIPROCESSOR_BYTES = 228 * 1024  # of shared memory; a block takes 1024 more than it asks for
FACTORS = [Factors(radix, 2**k, 12) for radix in (12, 16) for k in range(5)]
SIZES = [  # B, L, H, entries of the right and of the left kernel, N
    (2, 20000, 12, 5000, 4000, 12 * 2048),
    (1, 40000, 6, 3000, 9000, 12 * 2048),
    (1, 60000, 3, 100, 5000, 16 * 2048),
    (3, 65536, 33, 32768, 32768, 12 * 4096),
    (2, 49153, 40, 49153, 3, 16 * 4096),
    (1, 150000, 4, 30000, 30000, 24 * 4096),
    (2, 2**17, 9, 2**17, 0, 32 * 4096),
    (1, 2**18, 5, 2**17, 2**17, 48 * 4096),
    (1, 400000, 9, 400000, 5, 128 * 4096),
    (1, 600000, 3, 100000, 100000, 96 * 4096),
    (1, 2**20, 2, 400000, 0, 192 * 4096),
]


@pytest.mark.parametrize(
    ("entries", "factors"),
    [
        (16386, Factors(12, 1, 11)),
        (2 * 24576, Factors(12, 1, 11)),
        (2 * 24576 + 1, Factors(16, 1, 11)),
        (65536 + 32768, Factors(12, 1, 12)),
        (2 * 65536 - 1, Factors(16, 1, 12)),
        (2**18 + 2**17, Factors(12, 4, 12)),
        (2**21, Factors(16, 16, 12)),
    ],
)
def test_the_smallest_negacyclic_fft_is_chosen(entries, factors):
    assert smallest_factors(entries) == factors
    assert 2 * factors.size >= entries


@pytest.mark.parametrize("factors", FACTORS, ids=str)
def test_fft_columns_fit_on_a_multiprocessor(factors):
    for name in ("fft_columns", "inverse_fft_columns", "kernel_fft_columns"):
        tile = tile_for(name, factors)
        assert tile.channels * tile.points * factors.second_radix == tile.threads
        assert tile.blocks * (tile.bytes + 1024) <= MULTIPROCESSOR_BYTES
    inner, outer, powers = column_tables(factors, torch.device("cpu"))
    assert inner.shape == (
        factors.second_radix,
        1 if factors.second_radix == 1 else factors.radix,
        2,
    )
    assert outer.shape == (1 if factors.second_radix == 1 else factors.radix, 4096, 2)
    assert relative_error(powers[:, 2:].norm(dim=1), torch.ones(4096)) < 1e-6


@pytest.mark.parametrize(("length", "right", "left"), [(24, 13, 12), (35, 1, 1), (18, 18, 18)])
def test_a_negacyclic_fft_gives_the_convolution(length, right, left):
    """2 N = 36 entries are enough for `length + max(right - 1, left)` of them."""
    size = 18
    assert length + max(right - 1, left) <= 2 * size
    u = torch.randn(length, dtype=torch.float64)
    right, left = (torch.randn(k, dtype=torch.float64) for k in (right, left))
    x, kernel = torch.zeros(2, 2 * size, dtype=torch.float64)
    x[:length], kernel[: len(right)] = u, right
    kernel[2 * size - len(left) :] -= left.flip(0)
    z = torch.fft.ifft(spectrum(x) * spectrum(kernel)) / twist(size)
    y = torch.cat((z.real, -z.imag))[:length]
    want = plain_torch().forward(u[None, :, None], right[None], left[None])[0, :, 0]
    assert relative_error(y, want) < 1e-12


def spectrum(x):
    """Of a real x of 2 N entries modulo X^2N + 1, as a complex one modulo X^N + i."""
    size = len(x) // 2
    return torch.fft.fft(torch.complex(x[:size], -x[size:]) * twist(size))


def twist(size):
    return torch.exp(-2j * math.pi * torch.arange(size, dtype=torch.float64) / (4 * size))


@pytest.mark.gpu
class TestOnAGPU:
    @pytest.mark.parametrize("size", SIZES, ids=str)
    def test_twice_the_error_of_plain_pytorch(self, size):
        arguments = made(*size[:5])
        u, _, right, left = arguments
        assert factors_for(u, right, left).size == size[5]
        assert_twice_the_error_of_plain_pytorch(long_convolution, arguments)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_16_bit_inputs_are_as_accurate_as_their_type(self, dtype):
        assert_16_bit_inputs_are_right(long_convolution, *made(2, 65536, 12, 30000, 3), dtype)

    def test_a_cuda_graph_repeats_the_answer(self):
        arguments = made(2, 65536, 7, 32768, 32768)
        want = results(long_convolution, *arguments)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            have = results(long_convolution, *arguments)
        graph.replay()
        torch.cuda.synchronize()
        for one, other in zip(have, want, strict=True):
            assert torch.equal(one, other)

    def test_groups_of_sequences_give_the_same(self, monkeypatch):
        arguments = made(3, 50000, 4, 20000, 20000)
        whole = results(long_convolution, *arguments)
        monkeypatch.setattr(long_convolution, "WORKSPACE", 2 * 4 * 49152)
        for have, want in zip(results(long_convolution, *arguments), whole, strict=True):
            assert relative_error(have, want) < 1e-6


def made(batch, length, channels, right, left):
    u, dy = torch.randn(2, batch, length, channels, device=DEVICE)
    right = torch.randn(channels, right, device=DEVICE)
    left = torch.randn(channels, left, device=DEVICE)
    assert long_convolution.supports(u, right, left)
    return u, dy, right, left
