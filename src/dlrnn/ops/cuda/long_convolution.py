"""Convolution of sequences beyond 16384 positions: columns, rows, columns (columns.cu, rows.cu).

N = C S points in C = 12 to 256 rows of S = 2048 or 4096 points. These are 2 N real entries, enough
for a sequence and what wraps around, which is as long as a kernel. The complex rows take up to
twice the memory of the inputs; sequences are done a few at a time: they stay below a bound.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from dlrnn.ops.cuda import nvrtc
from dlrnn.ops.cuda.convolution import STORAGE
from dlrnn.ops.cuda.fft import Plan, middle_radices, roots, tables

SHORTEST, LONGEST = 15, 20  # log2 of the lengths, rounded up
WORKSPACE = 2**28  # complex points at a time: 2 GiB


def supports(u: Tensor, right: Tensor, left: Tensor) -> bool:
    """fp32 kernels, u in fp32, bf16 or fp16, on a Hopper GPU or later, 16385 to 2^20 positions."""
    return (
        u.is_cuda
        and u.dtype in STORAGE
        and right.dtype == left.dtype == torch.float32
        and bool(2**SHORTEST // 2 < u.shape[1] <= 2**LONGEST)
        and bool(u.numel() > 0)
        and torch.cuda.get_device_capability(u.device) >= (9, 0)
        and nvrtc.available()
    )


def forward(u: Tensor, right: Tensor, left: Tensor) -> Tensor:
    """As in `convolution`."""
    u, y = u.contiguous(), torch.empty(u.shape, dtype=u.dtype, device=u.device)
    size = _Sizes(u, right, left)
    spectrum = _kernel_spectrum(right, left, size)
    for part in size.parts():
        Z = _columns_in(u[part], size)
        _rows("multiply_rows", 1, size)(
            *(size.rows, size.threads, Z, spectrum, *size.inner_tables),
            *(Z.shape[0], size.rows),
        )
        _columns_out(Z, y[part], size)
    return y


def backward(dy: Tensor, u: Tensor, right: Tensor, left: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As in `convolution`."""
    dy, u = dy.to(u.dtype).contiguous(), u.contiguous()
    du = torch.empty(u.shape, dtype=u.dtype, device=u.device)
    size = _Sizes(u, right, left)
    spectrum = _kernel_spectrum(right, left, size)
    parts = list(size.parts())
    partial = right.new_empty(len(parts), size.rows, size.inner, 2)
    for k, part in enumerate(parts):
        Z_dy, Z_u = _columns_in(dy[part], size), _columns_in(u[part], size)
        _rows("correlate_rows", 2, size)(
            *(size.rows, size.threads, Z_dy, Z_u, spectrum, partial[k]),
            *(*size.inner_tables, Z_u.shape[0], size.rows),
        )
        _columns_out(Z_dy, du[part], size)
    return du, *_kernel_gradient(partial, right, left, size)


@dataclass(frozen=True)
class _Ring:
    """N = radix parts S points: columns of radix and parts, rows of S."""

    radix: int
    parts: int
    log2_inner: int

    @property
    def inner(self) -> int:
        """S."""
        return 1 << self.log2_inner

    @property
    def columns(self) -> int:
        """C."""
        return self.radix * self.parts

    @property
    def size(self) -> int:
        """N."""
        return self.columns * self.inner


def _smallest_ring(entries: int) -> _Ring:
    """With 2 N >= entries."""
    for log2_size in range(SHORTEST, LONGEST + 1):
        log2_inner = min(12, log2_size - 4)
        for radix in (12, 16):
            ring = _Ring(radix, 2 ** (log2_size - log2_inner - 4), log2_inner)
            if 2 * ring.size >= entries:
                return ring
    raise ValueError(f"{entries} entries are more than {2 * 2**LONGEST}")


class _Sizes:
    """N, how it is split, and the tables."""

    def __init__(self, u: Tensor, right: Tensor, left: Tensor) -> None:
        self.batch, self.length, self.channels = u.shape
        self.device = u.device
        self.ring = _smallest_ring(self.length + max(right.shape[1] - 1, left.shape[1]))
        self.inner = self.ring.inner
        self.rows = self.channels * self.ring.columns
        self.threads = self.inner // 16
        self.inner_tables = tables(self.ring.log2_inner, u.device)
        self.column_tables = _column_tables(self.ring, u.device)

    @property
    def folded(self) -> bool:
        """The end of a sequence lies in imaginary parts."""
        return self.length > self.ring.size

    def parts(self) -> Iterator[slice]:
        """Sequences that are done at a time."""
        step = max(1, WORKSPACE // (self.ring.size * self.channels))
        for start in range(0, self.batch, step):
            yield slice(start, min(start + step, self.batch))


def _columns_in(u: Tensor, size: _Sizes) -> Tensor:
    shape = u.shape[0], size.rows, size.inner, 2
    Z = torch.empty(shape, dtype=torch.float32, device=u.device)
    tile = _tile("columns_in", size.ring)
    _columns("columns_in", tile, u, size)(
        *(tile.grid(u.shape[0], size), tile.threads, u, Z, *size.column_tables),
        *(size.length, size.channels),
    )
    return Z


def _columns_out(Z: Tensor, y: Tensor, size: _Sizes) -> None:
    tile = _tile("columns_out", size.ring)
    _columns("columns_out", tile, y, size)(
        *(tile.grid(y.shape[0], size), tile.threads, Z, y, *size.column_tables),
        *(size.length, size.channels),
    )


@dataclass(frozen=True)
class _Tile:
    """What a block of columns.cu takes: `radix` points a thread, `along` neighbours."""

    ring: _Ring
    threads: int
    along: int
    blocks: int  # of a multiprocessor

    @property
    def channels(self) -> int:
        """Of a block."""
        return self.threads // self.ring.parts // self.along

    def grid(self, batch: int, size: _Sizes) -> tuple[int, int, int]:
        """Blocks: along, across and sequences; of many parts across first."""
        along, across = self.ring.inner // self.along, -(-size.channels // self.channels)
        return (along, across, batch) if self.ring.parts == 1 else (across, along, batch)

    @property
    def bytes(self) -> int:
        """Shared memory, with a point of padding."""
        return 8 * self.ring.radix * self.threads * (self.along + 1) // self.along


def _tile(name: str, ring: _Ring) -> _Tile:
    """As measured: going out, pieces of Z want to be long; of 16 parts that needs large blocks."""
    if ring.parts == 1:
        return _Tile(ring, 512, 16, blocks=3 if ring.radix == 12 else 2)
    if ring.parts == 16 and name != "kernel_columns":
        return _Tile(ring, 1024, 8 if name == "columns_out" else 4, blocks=1)
    if ring.parts == 4 and name == "columns_out":
        return _Tile(ring, 512, 16, blocks=2)
    return _Tile(ring, 512, {2: 16, 4: 8, 8: 8, 16: 4}[ring.parts], blocks=2)


def _kernel_spectrum(right: Tensor, left: Tensor, size: _Sizes) -> Tensor:
    right, left = right.contiguous(), left.contiguous()
    Z = right.new_empty(size.rows, size.inner, 2)
    tile = _tile("kernel_columns", size.ring)
    blocks = size.channels * size.inner * size.ring.parts // tile.threads
    _columns("kernel_columns_in", tile, right, size)(
        *(blocks, tile.threads, right, left, Z, *size.column_tables),
        *(right.shape[1], left.shape[1]),
    )
    _rows("transform_rows", 1, size)(
        *(size.rows, size.threads, Z, *size.inner_tables, size.ring.size)
    )
    return Z


def _kernel_gradient(
    partial: Tensor, right: Tensor, left: Tensor, size: _Sizes
) -> tuple[Tensor, Tensor]:
    """`partial` is used up."""
    _rows("transform_rows_back", 1, size)(
        *(size.rows, size.threads, partial, *size.inner_tables),
        *(size.ring.size, partial.shape[0], size.rows),
    )
    d_right, d_left = right.new_empty(right.shape), left.new_empty(left.shape)
    tile = _tile("kernel_columns", size.ring)
    blocks = size.channels * size.inner * size.ring.parts // tile.threads
    _columns("kernel_columns_out", tile, right, size)(
        *(blocks, tile.threads, partial, d_right, d_left, *size.column_tables),
        *(right.shape[1], left.shape[1]),
    )
    return d_right, d_left


def _rows(name: str, signals: int, size: _Sizes) -> nvrtc.Kernel:
    """With shared memory for the transforms of so many signals, and a row that comes in."""
    plan = Plan(size.ring.log2_inner, size.threads, blocks=512 // size.threads)
    points = signals * (plan.size + plan.size // 16) + plan.size
    powers = plan.size // 16 // middle_radices(plan.log2_size)[0] + 16
    files = ("device.cuh", "butterflies.cuh", "fft.cuh", "rows.cu")
    return nvrtc.load(files, name, plan.defines, 8 * points + 16 * powers + 16, size.device.index)


def _columns(name: str, tile: _Tile, like: Tensor, size: _Sizes) -> nvrtc.Kernel:
    bits, is_bf16 = STORAGE[like.dtype]
    defines = (
        ("STORAGE_BITS", bits),
        ("STORAGE_IS_BF16", is_bf16),
        ("THREADS", tile.threads),
        ("BLOCKS", tile.blocks),
        ("TILE_POINTS", tile.along),
        ("COLUMN_RADIX", tile.ring.radix),
        ("PARTS", tile.ring.parts),
        ("LOG2S", tile.ring.log2_inner),
        ("FOLDED", int(size.folded)),
    )
    files = ("device.cuh", "butterflies.cuh", "radix12.cuh", "columns.cu")
    return nvrtc.load(files, name, defines, tile.bytes, like.device.index)


@cache
def _column_tables(ring: _Ring, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """`inner`, `turns` and `powers` of columns.cu; made in float64."""
    i = torch.arange(ring.inner, dtype=torch.float64) / ring.size
    m = torch.arange(ring.parts, dtype=torch.float64) / ring.columns
    p = torch.arange(ring.radix if ring.parts > 1 else 1) + 0.25
    powers = ring.radix * i if ring.parts > 1 else i
    pairs = torch.cat((roots(powers), roots(4 * powers)), dim=1)
    inner, turns = roots(torch.outer(m, p)), roots(torch.outer(p, i))
    return inner.float().to(device), turns.float().to(device), pairs.float().to(device)
