"""The CUDA kernels of the convolution: at most twice the error of plain PyTorch, deterministic."""

import dataclasses
import math

import pytest
import torch
from kernels import (
    answers,
    assert_16_bit_inputs_are_right,
    assert_same_bits,
    assert_twice_the_error_of_plain_pytorch,
    convolution_inputs,
    results,
)
from support import refused, relative_error
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from dlrnn import ops
from dlrnn.ops.cuda import convolution, long_convolution, negacyclic_fft, nvrtc
from dlrnn.ops.cuda.long_convolution import (
    Factors,
    column_tables,
    factors_for,
    row_bytes,
    smallest_factors,
    tile_for,
)

SIZES = [  # B, L, H, entries of the right and of the left kernel
    (2, 129, 3, 129, 0),
    (67, 256, 3, 256, 256),
    (3, 500, 5, 500, 100),
    (1, 1000, 1, 1, 1000),
    (7, 2048, 12, 2048, 2048),
    (5, 4096, 9, 4096, 0),
    (2, 4097, 40, 4097, 0),
    (3, 8192, 16, 100, 8192),
    (7, 8192, 130, 8192, 0),
    (2, 8193, 3, 8193, 8193),
    (3, 9000, 5, 5, 7000),
    (2, 12345, 7, 12345, 1),
    (3, 16383, 150, 16383, 0),
    (5, 16384, 32, 8192, 8192),
    (7, 16384, 130, 8192, 8192),  # pairs of rows, one after the other
    (7, 16384, 40, 16384, 16384),
    (2, 16385, 5, 16385, 7),
    (2, 65536, 40, 30000, 30000),
    (1, 100000, 3, 100000, 0),
    (2, 2**18, 4, 2**18, 2**18),
    (1, 300000, 20, 300000, 5),
    (1, 2**20, 3, 2**20, 0),
]
LONG_SIZES = {  # the same, and the size N of the negacyclic FFT
    (2, 20000, 12, 5000, 4000): 12 * 2048,
    (1, 40000, 6, 3000, 9000): 12 * 2048,
    (1, 60000, 3, 100, 5000): 16 * 2048,
    (3, 65536, 33, 32768, 32768): 12 * 4096,
    (2, 49153, 40, 49153, 3): 16 * 4096,
    (1, 150000, 4, 30000, 30000): 24 * 4096,
    (2, 2**17, 9, 2**17, 0): 32 * 4096,
    (1, 2**18, 5, 2**17, 2**17): 48 * 4096,
    (1, 400000, 9, 400000, 5): 128 * 4096,
    (1, 600000, 3, 100000, 100000): 96 * 4096,
    (1, 2**20, 2, 400000, 0): 192 * 4096,
}
# Shared memory of a multiprocessor, on Hopper and the least; a block takes 1024 more than it asks.
MULTIPROCESSOR_BYTES, LEAST_MULTIPROCESSOR_BYTES = 228 * 1024, 100 * 1024


ROWS = [(2**k, 2**k) for k in range(negacyclic_fft.SHORTEST, convolution.LONGEST + 1)]


@pytest.mark.parametrize("rows", [*ROWS, (8192, 16384), (12288, 16384)])
def test_plans_fit_on_a_multiprocessor(rows):
    plan = negacyclic_fft.RowPlan(*rows)
    assert plan.residue_size * plan.residues == plan.size
    assert plan.teams * plan.team_size % 32 == 0
    for staged, block, multiprocessor in (
        (True, nvrtc.SHARED_MEMORY[9, 0], MULTIPROCESSOR_BYTES),
        (False, nvrtc.LEAST_SHARED_MEMORY, LEAST_MULTIPROCESSOR_BYTES),
    ):
        sized = dataclasses.replace(plan, staged=staged)
        assert sized.bytes(sized.kernel_teams) <= block
        for size in (sized.forward_bytes, sized.backward_bytes):
            assert size <= block
            assert plan.blocks * (size + 1024) <= multiprocessor
    tables, twists = negacyclic_fft.residue_tables(plan, torch.device("cpu"))
    count, threads = plan.residues, plan.team_size
    assert len(tables) == 32 + count * (count + 36) + (1 + count) * 2 * threads
    assert twists.shape == (plan.residues, plan.team_size, 2)
    for pairs in (tables.view(-1, 2), twists.view(-1, 2)):
        assert relative_error(pairs.norm(dim=1), torch.ones(len(pairs))) < 1e-6


def test_the_plan_has_as_few_residues_as_needed():
    kernel = torch.empty(1, 16384)
    sizes = [(4096, 4096), (8192, 1), (16384, 16384), (16384, 8193), (16384, 1), (9000, 7385)]
    plans = [negacyclic_fft.plan_for(L, kernel[:, :K], kernel[:, :0]) for L, K in sizes]
    assert [plan.residues for plan in plans] == [1, 2, 4, 3, 2, 2]
    assert negacyclic_fft.plan_for(16384, kernel[:, :1], kernel[:, :8192]).residues == 3
    assert negacyclic_fft.plan_for(16384, kernel[:, :1], kernel[:, :8193]).residues == 4


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


@pytest.mark.parametrize("size", LONG_SIZES, ids=str)
def test_a_long_convolution_has_the_smallest_negacyclic_fft(size):
    u, _, right, left = convolution_inputs(*size, device="meta")
    assert factors_for(u, right, left).size == LONG_SIZES[size]


@pytest.mark.parametrize("radix", [12, 16])
@pytest.mark.parametrize("columns", [1, 2, 4, 8, 16])
def test_fft_columns_fit_on_a_multiprocessor(radix, columns):
    factors = Factors(radix, columns, 12)
    for name in ("fft_columns", "inverse_fft_columns", "kernel_fft_columns"):
        tile = tile_for(name, factors)
        assert tile.channels * tile.points * factors.second_radix == tile.threads
        assert tile.blocks * (tile.bytes + 1024) <= MULTIPROCESSOR_BYTES
        small = tile_for(name, factors, nvrtc.LEAST_SHARED_MEMORY)
        assert small.channels * small.points * factors.second_radix == small.threads
        assert small.bytes <= nvrtc.LEAST_SHARED_MEMORY
    inner, outer, powers = column_tables(factors, torch.device("cpu"))
    twists = 1 if factors.second_radix == 1 else factors.radix
    assert inner.shape == (factors.second_radix, twists, 2)
    assert outer.shape == (twists, 4096, 2)
    assert relative_error(powers[:, 2:].norm(dim=1), torch.ones(4096)) < 1e-6


@pytest.mark.parametrize("log2_inner", [11, 12])
def test_fft_rows_fit_on_a_multiprocessor(log2_inner):
    factors = Factors(12, 1, log2_inner)
    blocks = 512 // (factors.inner // 16)
    for signals in (1, 2):
        assert blocks * (row_bytes(signals, 1, factors) + 1024) <= MULTIPROCESSOR_BYTES
        assert row_bytes(signals, 0, factors) <= nvrtc.LEAST_SHARED_MEMORY


@pytest.mark.parametrize(
    ("capability", "staged"),
    [((8, 0), False), ((8, 6), False), ((9, 0), True), ((10, 0), True), ((12, 0), False)],
)
def test_rows_are_staged_where_shared_memory_suffices(capability, staged, monkeypatch):
    monkeypatch.setattr(nvrtc, "capability", lambda _: capability)
    kernel = torch.empty(1, 3000)
    for length in (300, 3000, 8000, 16000):
        assert negacyclic_fft.plan_for(length, kernel, kernel).staged == staged


def test_cpu_tensors_are_not_supported():
    u, kernel = torch.zeros(1, 500, 2), torch.zeros(2, 500)
    for kernels in (convolution, long_convolution):
        assert not kernels.supports(u, kernel, kernel)


@pytest.mark.parametrize("length", [200, 9000, 20000])
def test_a_compiled_graph_serves_other_lengths_too(length, monkeypatch):
    """Whether the kernels support u depends on bounds of its length only."""
    for kernels in (convolution, long_convolution):
        monkeypatch.setattr(kernels.nvrtc, "available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    mode = FakeTensorMode(shape_env=ShapeEnv())
    sizes = StatelessSymbolicContext([DimDynamic.STATIC, DimDynamic.DYNAMIC])
    right = mode.from_tensor(torch.empty(4, length), symbolic_context=sizes)
    with mode:
        u = torch.empty(2, right.shape[1], 4, device="cuda")
    found = [kernels.supports(u, right, right) for kernels in (convolution, long_convolution)]
    assert found == [length <= 2**14, length > 2**14]
    assert isinstance(u.shape[1], torch.SymInt)
    assert u.shape[1].node.maybe_as_int() is None, "the graph is tied to one length"


@pytest.mark.gpu
class TestOnAGPU:
    @pytest.mark.parametrize("size", [*SIZES, *LONG_SIZES], ids=str)
    def test_twice_the_error_of_plain_pytorch(self, size):
        kernels, arguments = made(*size)
        assert_twice_the_error_of_plain_pytorch(kernels, arguments)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize(
        "size",
        [(2, length, 12, length, 3) for length in (4000, 9001, 20000)] + [(2, 65536, 12, 30000, 3)],
    )
    def test_16_bit_inputs_are_as_accurate_as_their_type(self, dtype, size):
        kernels, arguments = made(*size)
        assert_16_bit_inputs_are_right(kernels, *arguments, dtype)

    @pytest.mark.parametrize("length", [5001, 10001])
    def test_channel_major_inputs_are_not_changed(self, length):
        kernels, (u, dy, right, left) = made(2, length, 6, length, 9)
        rows_y, rows_u, kept = kernels.forward_rows(u, right, left, None, u.dtype)
        assert torch.equal(rows_u[..., :length], u.transpose(1, 2))
        y, rows_dy = convolution.from_rows(rows_y, length, u.dtype), convolution.to_rows(dy)
        found = [
            [y, *kernels.backward_of_rows(dy, rows_u, right, left, None)],
            [y, *kernels.backward_rows(rows_dy, rows_u, kept, length, right, left, None, u.dtype)],
        ]
        assert torch.equal(rows_u[..., :length], u.transpose(1, 2))
        for have in found:
            assert_same_bits(have, results(kernels, u, dy, right, left))

    @pytest.mark.parametrize("length", [500, 9001, 20000])
    def test_the_op_equals_its_kernels(self, length):
        """`ops.convolution` equals its kernels; it keeps channel-major inputs for backward."""
        kernels, (u, dy, right, left) = made(2, length, 6, length, 9)
        have = answers(ops.convolution, (u, right, left), dy)
        assert_same_bits(have, results(kernels, u, dy, right, left))
        assert torch.equal(ops.convolution(u, right, left), have[0])

    @pytest.mark.parametrize(
        "size",
        [(3, 500, 64, 500, 0), (4, 16384, 32, 9000, 9000), (2, 65536, 7, 32768, 32768)],
        ids=str,
    )
    def test_overlapping_kernels_read_finished_inputs(self, size):
        """A captured graph, replayed with two alternating sets of inputs, gives the same bits."""
        kernels, given = made(*size)
        inputs = [x.mT.contiguous().mT for x in given]
        sets = [[x.clone() for x in inputs], [torch.randn_like(x) for x in inputs]]
        wanted = [results(kernels, *each) for each in sets]
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            have = results(kernels, *inputs)
        for replay in range(20):  # data that is read too early belongs to the other set
            for one, other in zip(inputs, sets[replay % 2], strict=True):
                one.copy_(other)
            for one in have:
                one.fill_(math.nan)
            graph.replay()
            assert_same_bits(have, wanted[replay % 2])

    def test_groups_of_sequences_give_the_same(self, monkeypatch):
        kernels, arguments = made(3, 50000, 4, 20000, 20000)
        whole = results(kernels, *arguments)
        monkeypatch.setattr(long_convolution, "WORKSPACE", 2 * 4 * 49152)
        for have, want in zip(results(kernels, *arguments), whole, strict=True):
            assert relative_error(have, want) < 1e-6

    @pytest.mark.parametrize("length", [5001, 10001, 20000])
    def test_nan_reaches_its_outputs_only(self, length):
        kernels, (u, dy, right, left) = made(2, length, 6, length, 0)
        u[0, 3, 2] = dy[1, length - 1, 4] = math.nan
        y, du, d_right, _ = results(kernels, u, dy, right, left)
        for nan in (y[0, 3:, 2], du[1, :, 4], d_right[2], d_right[4]):
            assert nan.isnan().all()
        for number in (y[1], du[0], d_right[3]):
            assert number.isfinite().all()

    def test_float64_is_refused(self):
        kernels, arguments = made(1, 500, 2, 500, 0)
        u, _, right, left = (x.double() for x in arguments)
        assert not kernels.supports(u, right, left)
        with ops.use_backend("fused"), refused("convolution", "fused"):
            ops.convolution(u, right, left)


def made(*size):
    u, dy, right, left = convolution_inputs(*size)
    every = (convolution, long_convolution)
    (kernels,) = (kernels for kernels in every if kernels.supports(u, right, left))
    return kernels, (u, dy, right, left)
