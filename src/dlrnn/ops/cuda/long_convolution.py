"""Convolution of 16385 to 2^20 positions by a four-step FFT (fft_columns.cu, fft_rows.cu).

N = C S points form C = 12 to 256 rows of S = 2048 or 4096 points: FFT columns, FFTs of the rows
with the pointwise product, inverse FFT columns. N complex points are 2 N real entries, enough for a
sequence and what wraps around, which is as long as a kernel. The complex rows take up to twice the
memory of the inputs; a few sequences are processed at a time, so that they stay below a bound.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from dlrnn.ops.cuda import nvrtc
from dlrnn.ops.cuda.convolution import STORAGE, takes
from dlrnn.ops.cuda.fft import middle_radices, roots, tables
from dlrnn.ops.cuda.negacyclic_fft import is_staged
from dlrnn.ops.cuda.nvrtc import ceil_div

SHORTEST, LONGEST = 15, 20  # log2 of the lengths, rounded up
WORKSPACE = 2**28  # complex points at a time: 2 GiB


def supports(u: Tensor, right: Tensor, left: Tensor) -> bool:
    """fp32 kernels, u in fp32, bf16 or fp16, compute capability 8.0 or later, 16385 to 2^20
    positions.
    """
    return takes(u, right, left, SHORTEST, LONGEST)


def forward(u: Tensor, right: Tensor, left: Tensor) -> Tensor:
    """As in `convolution`."""
    u, y = u.contiguous(), torch.empty(u.shape, dtype=u.dtype, device=u.device)
    sizes = _Sizes(u, right, left)
    spectrum = _kernel_spectrum(right, left, sizes)
    for part in sizes.parts():
        Z = _columns(u[part], sizes)
        _load_rows("multiply_rows", 1, sizes)(
            *(sizes.rows, sizes.threads, Z, spectrum, *sizes.inner_tables),
            *(Z.shape[0], sizes.rows),
        )
        _inverse_columns(Z, y[part], sizes)
    return y


def backward(dy: Tensor, u: Tensor, right: Tensor, left: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As in `convolution`."""
    dy, u = dy.to(u.dtype).contiguous(), u.contiguous()
    du = torch.empty(u.shape, dtype=u.dtype, device=u.device)
    sizes = _Sizes(u, right, left)
    spectrum = _kernel_spectrum(right, left, sizes)
    parts = list(sizes.parts())
    partial = right.new_empty(len(parts), sizes.rows, sizes.inner, 2)
    for k, part in enumerate(parts):
        Z_dy, Z_u = _columns(dy[part], sizes), _columns(u[part], sizes)
        _load_rows("correlate_rows", 2, sizes)(
            *(sizes.rows, sizes.threads, Z_dy, Z_u, spectrum, partial[k]),
            *(*sizes.inner_tables, Z_u.shape[0], sizes.rows),
        )
        _inverse_columns(Z_dy, du[part], sizes)
    return du, *_kernel_gradient(partial, right, left, sizes)


@dataclass(frozen=True)
class Factors:
    """N = radix second_radix S points: columns of radix second_radix = C points, rows of S."""

    radix: int
    second_radix: int
    log2_inner: int

    @property
    def inner(self) -> int:
        """S."""
        return 1 << self.log2_inner

    @property
    def columns(self) -> int:
        """C."""
        return self.radix * self.second_radix

    @property
    def size(self) -> int:
        """N."""
        return self.columns * self.inner


def smallest_factors(entries: int) -> Factors:
    """The factors of the smallest N with 2 N >= entries."""
    for log2_size in range(SHORTEST, LONGEST + 1):
        log2_inner = min(12, log2_size - 4)
        for radix in (12, 16):
            factors = Factors(radix, 2 ** (log2_size - log2_inner - 4), log2_inner)
            if 2 * factors.size >= entries:
                return factors
    raise ValueError(f"at most {2 * 2**LONGEST} entries can be convolved; got {entries}.")


def factors_for(u: Tensor, right: Tensor, left: Tensor) -> Factors:
    """The factors for sequences and kernels of these lengths."""
    return smallest_factors(u.shape[1] + max(right.shape[1] - 1, left.shape[1]))


class _Sizes:
    """Sizes of u, N with its factors, and tables."""

    def __init__(self, u: Tensor, right: Tensor, left: Tensor) -> None:
        self.batch, self.length, self.channels = u.shape
        self.device = u.device
        self.factors = factors_for(u, right, left)
        self.inner = self.factors.inner
        self.rows = self.channels * self.factors.columns
        self.threads = self.inner // 16
        self.inner_tables = tables(self.factors.log2_inner, u.device)
        self.column_tables = column_tables(self.factors, u.device)

    @property
    def folded(self) -> bool:
        """Whether the end of a sequence is in the imaginary parts."""
        return self.length > self.factors.size

    def parts(self) -> Iterator[slice]:
        """The sequences that are processed at a time."""
        step = max(1, WORKSPACE // (self.factors.size * self.channels))
        for start in range(0, self.batch, step):
            yield slice(start, min(start + step, self.batch))


@dataclass(frozen=True)
class Tile:
    """A block's tile in fft_columns.cu: `points` adjacent points i, `radix` pieces in a thread."""

    factors: Factors
    threads: int
    points: int
    blocks: int  # of a multiprocessor

    @property
    def channels(self) -> int:
        """Channels of a block."""
        return self.threads // self.factors.second_radix // self.points

    def grid(self, batch: int, channels: int) -> tuple[int, int, int]:
        """Blocks along points, channels and sequences; with a second radix channels come first."""
        along, across = self.factors.inner // self.points, ceil_div(channels, self.channels)
        return (along, across, batch) if self.factors.second_radix == 1 else (across, along, batch)

    @property
    def bytes(self) -> int:
        """Shared memory, with a point of padding."""
        return 8 * self.factors.radix * self.threads * (self.points + 1) // self.points


def tile_for(name: str, factors: Factors, available: int = nvrtc.SHARED_MEMORY[9, 0]) -> Tile:
    """The tile of a kernel, by measurement: inverse columns read long runs of Z.

    With a second radix of 16 that needs large blocks, if that much shared memory is available.
    """
    if factors.second_radix == 1:
        return Tile(factors, 512, 16, blocks=3 if factors.radix == 12 else 2)
    if factors.second_radix == 16 and not name.startswith("kernel"):
        tile = Tile(factors, 1024, 8 if name == "inverse_fft_columns" else 4, blocks=1)
        if tile.bytes <= available:
            return tile
    if factors.second_radix == 4 and name == "inverse_fft_columns":
        return Tile(factors, 512, 16, blocks=2)
    return Tile(factors, 512, {2: 16, 4: 8, 8: 8, 16: 4}[factors.second_radix], blocks=2)


def _columns(u: Tensor, sizes: _Sizes) -> Tensor:
    """Z [B, H C, S]."""
    shape = u.shape[0], sizes.rows, sizes.inner, 2
    Z = torch.empty(shape, dtype=torch.float32, device=u.device)
    _run_columns("fft_columns", (u, Z), u, (sizes.length, sizes.channels), sizes)
    return Z


def _inverse_columns(Z: Tensor, y: Tensor, sizes: _Sizes) -> None:
    _run_columns("inverse_fft_columns", (Z, y), y, (sizes.length, sizes.channels), sizes)


def _kernel_spectrum(right: Tensor, left: Tensor, sizes: _Sizes) -> Tensor:
    right, left = right.contiguous(), left.contiguous()
    Z, lengths = right.new_empty(sizes.rows, sizes.inner, 2), (right.shape[1], left.shape[1])
    _run_columns("kernel_fft_columns", (right, left, Z), right, lengths, sizes)
    _load_rows("transform_rows", 1, sizes)(
        *(sizes.rows, sizes.threads, Z, *sizes.inner_tables, sizes.factors.size)
    )
    return Z


def _kernel_gradient(
    partial: Tensor, right: Tensor, left: Tensor, sizes: _Sizes
) -> tuple[Tensor, Tensor]:
    """The gradients of both kernels from `partial`, which is overwritten."""
    _load_rows("inverse_transform_rows", 1, sizes)(
        *(sizes.rows, sizes.threads, partial, *sizes.inner_tables),
        *(sizes.factors.size, partial.shape[0], sizes.rows),
    )
    d_right, d_left = right.new_empty(right.shape), left.new_empty(left.shape)
    tensors, lengths = (partial, d_right, d_left), (right.shape[1], left.shape[1])
    _run_columns("kernel_inverse_fft_columns", tensors, right, lengths, sizes)
    return d_right, d_left


def _load_rows(name: str, signals: int, sizes: _Sizes) -> nvrtc.Kernel:
    """A kernel of fft_rows.cu for `signals` transforms at a time."""
    defines = (
        ("STORAGE_BITS", 32),
        ("LOG2N", sizes.factors.log2_inner),
        ("CHANNELS", 1),
        ("THREADS", sizes.threads),
        ("BLOCKS", 512 // sizes.threads),
        ("STAGED", staged := int(is_staged(sizes.device))),
    )
    files = ("device.cuh", "butterflies.cuh", "fft.cuh", "fft_rows.cu")
    shared_bytes = row_bytes(signals, staged, sizes.factors)
    return nvrtc.load(files, name, defines, shared_bytes, sizes.device.index)


def row_bytes(signals: int, stages: int, factors: Factors) -> int:
    """Shared memory in fft_rows.cu: points of `signals` transforms, stages, tables, an mbarrier."""
    points = signals * (factors.inner + factors.inner // 16) + stages * factors.inner
    powers = factors.inner // 16 // middle_radices(factors.log2_inner)[0] + 16
    return 8 * points + 16 * powers + 16


def _run_columns(
    name: str, tensors: tuple[Tensor, ...], stored: Tensor, lengths: tuple[int, int], sizes: _Sizes
) -> None:
    """Launch a kernel of fft_columns.cu; `stored` is the tensor in the sequences' dtype."""
    tile = tile_for(name, sizes.factors, nvrtc.shared_memory_bytes(sizes.device))
    defines = (
        *STORAGE[stored.dtype],
        ("THREADS", tile.threads),
        ("BLOCKS", tile.blocks),
        ("TILE_POINTS", tile.points),
        ("COLUMN_RADIX", tile.factors.radix),
        ("SECOND_RADIX", tile.factors.second_radix),
        ("LOG2S", tile.factors.log2_inner),
        ("FOLDED", int(sizes.folded)),
    )
    grid = tile.grid(stored.shape[0], sizes.channels)
    if name.startswith("kernel"):  # a block has one channel
        grid = sizes.channels * sizes.inner * tile.factors.second_radix // tile.threads, 1, 1
    files = ("device.cuh", "butterflies.cuh", "radix12.cuh", "fft_columns.cu")
    nvrtc.load(files, name, defines, tile.bytes, sizes.device.index)(
        *(grid, tile.threads), *tensors, *sizes.column_tables, *lengths
    )


@cache
def column_tables(factors: Factors, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """`inner`, `outer` and `powers` of fft_columns.cu; computed in float64."""
    i = torch.arange(factors.inner, dtype=torch.float64) / factors.size
    m = torch.arange(factors.second_radix, dtype=torch.float64) / factors.columns
    p = torch.arange(factors.radix if factors.second_radix > 1 else 1) + 0.25
    powers = factors.radix * i if factors.second_radix > 1 else i
    pairs = torch.cat((roots(powers), roots(4 * powers)), dim=1)
    inner, outer = roots(torch.outer(m, p)), roots(torch.outer(p, i))
    return inner.float().to(device), outer.float().to(device), pairs.float().to(device)
