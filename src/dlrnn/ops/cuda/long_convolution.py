"""Convolution of sequences beyond 16384 positions: columns, rows, columns (columns.cu, rows.cu).

N = C S points, N >= L, in C = 16 to 256 rows of S = 2048 or 4096 points. The complex rows take
twice the memory of the inputs; sequences are done a few at a time, so that they stay below a bound.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from dlrnn.ops.cuda import nvrtc
from dlrnn.ops.cuda.convolution import STORAGE, Plan, middle_radices, roots, tables

SHORTEST, LONGEST = 15, 20  # log2 N
WORKSPACE = 2**28  # complex points at a time: 2 GiB


def supports(u: Tensor, right: Tensor, left: Tensor) -> bool:
    """fp32 kernels, u in fp32, bf16 or fp16, on a Hopper GPU or later, 16385 to 2^20 positions."""
    return (
        u.is_cuda
        and u.dtype in STORAGE
        and right.dtype == left.dtype == torch.float32
        and 2**SHORTEST // 2 < u.shape[1] <= 2**LONGEST
        and u.numel() > 0
        and torch.cuda.get_device_capability(u.device) >= (9, 0)
        and nvrtc.available()
    )


def forward(u: Tensor, right: Tensor, left: Tensor) -> Tensor:
    """As in `convolution`."""
    u, y = u.contiguous(), torch.empty(u.shape, dtype=u.dtype, device=u.device)
    size = _Sizes(u)
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
    size = _Sizes(u)
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


class _Sizes:
    """N, how it is split, and the tables."""

    def __init__(self, u: Tensor) -> None:
        self.batch, self.length, self.channels = u.shape
        self.device = u.device
        self.log2_size = max(SHORTEST, (self.length - 1).bit_length())
        self.size: int = 2**self.log2_size
        self.log2_inner = min(12, self.log2_size - 4)
        self.inner: int = 2**self.log2_inner
        self.rows = self.channels * self.size // self.inner
        self.threads = self.inner // 16
        self.inner_tables = tables(self.log2_inner, u.device)
        self.column_parts = self.size // self.inner // 16
        self.column_tables = _column_tables(self.log2_size, self.log2_inner, u.device)

    def parts(self) -> Iterator[slice]:
        """Sequences that are done at a time."""
        step = max(1, WORKSPACE // (self.size * self.channels))
        for start in range(0, self.batch, step):
            yield slice(start, min(start + step, self.batch))


def _columns_in(u: Tensor, size: _Sizes) -> Tensor:
    shape = u.shape[0], size.rows, size.inner, 2
    Z = torch.empty(shape, dtype=torch.float32, device=u.device)
    tile = _Tile(512, size.column_parts)
    _columns("columns_in", tile, u)(
        *(u.shape[0] * tile.count(size), tile.threads, u, Z, *size.column_tables),
        *(size.length, size.channels, size.inner),
    )
    return Z


def _columns_out(Z: Tensor, y: Tensor, size: _Sizes) -> None:
    tile = _Tile(256 if size.column_parts == 1 else 512, size.column_parts)
    _columns("columns_out", tile, y)(
        *(y.shape[0] * tile.count(size), tile.threads, Z, y, *size.column_tables),
        *(size.length, size.channels, size.inner),
    )


@dataclass(frozen=True)
class _Tile:
    """What a block of columns.cu takes: 16 points a thread."""

    threads: int
    parts: int

    @property
    def along(self) -> int:
        """Points i."""
        return 16 if self.parts <= 2 else 8 if self.parts <= 8 else 4

    def count(self, size: _Sizes) -> int:
        """Tiles of one sequence."""
        channels = self.threads // self.parts // self.along
        return -(-size.channels // channels) * (size.inner // self.along)

    @property
    def bytes(self) -> int:
        """Shared memory, with a point of padding."""
        return 8 * 16 * self.threads * (self.along + 1) // self.along


def _kernel_spectrum(right: Tensor, left: Tensor, size: _Sizes) -> Tensor:
    right, left = right.contiguous(), left.contiguous()
    Z = right.new_empty(size.rows, size.inner, 2)
    tile = _Tile(512, size.column_parts)
    blocks = size.rows // 16 * size.inner // tile.threads
    _columns("kernel_columns_in", tile, right)(
        *(blocks, tile.threads, right, left, Z, *size.column_tables),
        *(right.shape[1], left.shape[1], size.inner),
    )
    spectrum = torch.empty_like(Z)
    _rows("transform_rows", 1, size)(
        *(size.rows, size.threads, Z, spectrum, *size.inner_tables, size.size)
    )
    return spectrum


def _kernel_gradient(
    partial: Tensor, right: Tensor, left: Tensor, size: _Sizes
) -> tuple[Tensor, Tensor]:
    Z = right.new_empty(size.rows, size.inner, 2)
    _rows("transform_rows_back", 1, size)(
        *(size.rows, size.threads, partial, Z, *size.inner_tables),
        *(size.size, partial.shape[0], size.rows),
    )
    d_right, d_left = right.new_empty(right.shape), left.new_empty(left.shape)
    tile = _Tile(512, size.column_parts)
    blocks = size.rows // 16 * size.inner // tile.threads
    _columns("kernel_columns_out", tile, right)(
        *(blocks, tile.threads, Z, d_right, d_left, *size.column_tables),
        *(right.shape[1], left.shape[1], size.inner),
    )
    return d_right, d_left


def _rows(name: str, signals: int, size: _Sizes) -> nvrtc.Kernel:
    """With shared memory for the transforms of so many signals, and a row that comes in."""
    plan = Plan(size.log2_inner, channels=1, threads=size.threads, blocks=512 // size.threads)
    points = signals * (plan.size + plan.size // 16) + plan.size
    powers = plan.size // 16 // middle_radices(plan.log2_size)[0] + 16
    files = ("device.cuh", "butterflies.cuh", "fft.cuh", "rows.cu")
    return nvrtc.load(files, name, plan.defines, 8 * points + 16 * powers + 16, size.device.index)


def _columns(name: str, tile: _Tile, like: Tensor) -> nvrtc.Kernel:
    bits, is_bf16 = STORAGE[like.dtype]
    storage = ("STORAGE_BITS", bits), ("STORAGE_IS_BF16", is_bf16)
    defines = (*storage, ("THREADS", tile.threads), ("PARTS", tile.parts))
    files = ("device.cuh", "butterflies.cuh", "columns.cu")
    return nvrtc.load(files, name, defines, tile.bytes, like.device.index)


@cache
def _column_tables(
    log2_size: int, log2_inner: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """`inner`, `turns` and `powers` of columns.cu; made in float64."""
    size, rows = 2**log2_size, 2 ** (log2_size - log2_inner)
    i = torch.arange(2**log2_inner, dtype=torch.float64) / size
    m = torch.arange(rows // 16, dtype=torch.float64) / rows
    p = torch.arange(16 if rows > 16 else 1) + 0.25
    powers = i if rows == 16 else 16 * i
    pairs = torch.cat((roots(powers), roots(4 * powers)), dim=1)
    inner, turns = roots(torch.outer(m, p)), roots(torch.outer(p, i))
    return inner.float().to(device), turns.float().to(device), pairs.float().to(device)
