"""Convolution of sequences beyond 16384 positions: columns, rows, columns (columns.cu, rows.cu).

N = 16 S or 256 S points, N >= L, with rows of S = 512 to 4096 points. The complex rows take twice
the memory of the inputs; sequences are done a few at a time, so that they stay below a bound.
"""

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

from dlrnn.ops.cuda import nvrtc
from dlrnn.ops.cuda.convolution import STORAGE, Plan, load, roots, tables

SHORTEST, LONGEST = 15, 20  # log2 N
WORKSPACE = 2**28  # complex points at a time: 2 GiB
COLUMN_BYTES = 8 * 16 * 32 * 17


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
        self.size = 2**self.log2_size
        self.twice = self.log2_size > 16  # two passes over columns
        self.log2_inner = self.log2_size - (8 if self.twice else 4)
        self.inner = 2**self.log2_inner
        self.rows = self.channels * self.size // self.inner
        self.threads = self.inner // 16
        self.inner_tables = tables(self.log2_inner, u.device)
        self.column_tables = _column_tables(self.log2_size, u.device)

    def parts(self) -> Iterator[slice]:
        """Sequences that are done at a time."""
        step = max(1, WORKSPACE // (self.size * self.channels))
        for start in range(0, self.batch, step):
            yield slice(start, min(start + step, self.batch))


def _columns_in(u: Tensor, size: _Sizes) -> Tensor:
    shape = u.shape[0], size.rows, size.inner, 2
    Z = torch.empty(shape, dtype=torch.float32, device=u.device)
    powers, twist = size.column_tables
    stride = size.size // 16
    blocks = u.shape[0] * -(-size.channels // 32) * (stride // 16)
    _columns("columns_in", COLUMN_BYTES, 512, u)(
        *(blocks, 512, u, Z, powers, twist, size.length, size.channels, stride)
    )
    _between("split_rows", Z, u.shape[0] * size.channels * 16, size)
    return Z


def _columns_out(Z: Tensor, y: Tensor, size: _Sizes) -> None:
    _between("join_rows", Z, y.shape[0] * size.channels * 16, size)
    powers, twist = size.column_tables
    stride = size.size // 16
    blocks = y.shape[0] * -(-size.channels // 32) * (stride // 16)
    _columns("columns_out", COLUMN_BYTES, 512, y)(
        *(blocks, 512, Z, y, powers, twist, size.length, size.channels, stride)
    )


def _between(name: str, Z: Tensor, rows: int, size: _Sizes) -> None:
    """The second pass over columns, of rows of N / 16 points."""
    if size.twice:
        powers, _ = _column_tables(size.log2_size - 4, Z.device)
        _columns(name, 0, 256, Z)(rows * (size.inner // 256), 256, Z, powers, size.inner)


def _kernel_spectrum(right: Tensor, left: Tensor, size: _Sizes) -> Tensor:
    right, left = right.contiguous(), left.contiguous()
    Z = right.new_empty(size.rows, size.inner, 2)
    stride = size.size // 16
    _columns("kernel_columns_in", 0, 256, right)(
        *(size.channels * (stride // 256), 256, right, left, Z, *size.column_tables),
        *(right.shape[1], left.shape[1], stride),
    )
    _between("split_rows", Z, size.channels * 16, size)
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
    _between("join_rows", Z, size.channels * 16, size)
    d_right, d_left = right.new_empty(right.shape), left.new_empty(left.shape)
    stride = size.size // 16
    _columns("kernel_columns_out", 0, 256, right)(
        *(size.channels * (stride // 256), 256, Z, d_right, d_left, *size.column_tables),
        *(right.shape[1], left.shape[1], stride),
    )
    return d_right, d_left


def _rows(name: str, signals: int, size: _Sizes) -> nvrtc.Kernel:
    plan = Plan(size.log2_inner, channels=1, threads=size.threads, blocks=512 // size.threads)
    return load("rows.cu", name, plan, signals, size.device)


def _columns(name: str, shared_bytes: int, threads: int, like: Tensor) -> nvrtc.Kernel:
    bits, is_bf16 = STORAGE[like.dtype]
    defines = ("STORAGE_BITS", bits), ("STORAGE_IS_BF16", is_bf16), ("THREADS", threads)
    files = ("device.cuh", "butterflies.cuh", "columns.cu")
    return nvrtc.load(files, name, defines, shared_bytes, like.device.index)


@cache
def _column_tables(log2_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """`(w_N^i, w_N^4i)` and `w_4N^i`, i < N / 16, `w_N = exp(-2 pi i / N)`; made in float64."""
    size = 2**log2_size
    i = torch.arange(size // 16, dtype=torch.float64)
    powers = torch.cat((roots(i / size), roots(4 * i / size)), dim=1)
    return powers.float().to(device), roots(i / (4 * size)).float().to(device)
