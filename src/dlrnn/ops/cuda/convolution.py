"""Long convolution, forward and backward: rows in, one kernel, rows out.

The meaning is that of `ops.convolution`'s own functions; convolution.cu has the mathematics. Sizes
are powers of two, N >= L: from 256 to 8192 points a whole transform fits into one block.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from dlrnn.ops.cuda import nvrtc

SHORTEST, LONGEST = 8, 13  # log2 N
STORAGE = {torch.float32: (32, 0), torch.bfloat16: (16, 1), torch.float16: (16, 0)}


@dataclass(frozen=True)
class Plan:
    """How transforms of N points are spread: channels a block, blocks a multiprocessor."""

    log2_size: int
    channels: int
    threads: int
    blocks: int

    @property
    def size(self) -> int:
        """N."""
        return 1 << self.log2_size

    def bytes(self, signals: int) -> int:
        """Shared memory: points (a row of padding after 16), boxes, tables, a barrier."""
        points = self.channels * self.size
        tables = 16 * (self.size // 16 // middle_radices(self.log2_size)[0] + 16)
        return signals * (8 * (points + points // 16) + 4 * (points + 32)) + tables + 16

    @property
    def defines(self) -> nvrtc.Defines:
        """What the sources want to know at compile time."""
        return (
            ("STORAGE_BITS", 32),
            ("LOG2N", self.log2_size),
            ("CHANNELS", self.channels),
            ("THREADS", self.threads),
            ("BLOCKS", self.blocks),
        )


def supports(u: Tensor, right: Tensor, left: Tensor) -> bool:
    """fp32 kernels, u in fp32, bf16 or fp16, on a Hopper GPU or later, lengths up to 8192."""
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
    """`y_i = sum_{j<=i} right_{i-j} u_j + sum_{j>i} left_{j-i-1} u_j`."""
    (rows,) = to_rows(u)
    _convolve(rows, rows, u.shape[1], right, left)
    return from_rows(rows, u.shape[1], u.dtype)


def backward(dy: Tensor, u: Tensor, right: Tensor, left: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of u and of both kernels."""
    rows_dy, rows_u = to_rows(dy.to(u.dtype), u)
    rows_du, d_right, d_left = backward_rows(rows_dy, rows_u, u.shape[1], right, left)
    return from_rows(rows_du, u.shape[1], u.dtype), d_right, d_left


def forward_rows(rows_u: Tensor, length: int, right: Tensor, left: Tensor) -> Tensor:
    """`forward` of rows, fp32 [B, H, L or a little more]; `rows_u` stays as it is."""
    rows_y = torch.empty_like(rows_u)
    _convolve(rows_u, rows_y, length, right, left)
    return rows_y


def backward_rows(
    rows_dy: Tensor, rows_u: Tensor, length: int, right: Tensor, left: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`backward` of rows; `rows_dy` may be overwritten (here it becomes du), `rows_u` stays."""
    batch, channels, stride = rows_u.shape
    plan = plan_for(_log2_size(length))
    spectrum = _kernel_spectrum(right, left, plan.log2_size)
    blocks, groups = _grid(plan, batch, channels, rows_u.device)
    partial = right.new_empty(groups, channels, plan.size, 2)
    load("convolution.cu", "convolve_backward", plan, 2, rows_u.device)(
        *(blocks, plan.threads, rows_dy, rows_u, spectrum, partial),
        *(*tables(plan.log2_size, rows_u.device), batch, length, stride, channels, groups),
    )
    return rows_dy, *_kernel_gradient(partial, right, left, plan.log2_size)


def _convolve(rows_u: Tensor, rows_y: Tensor, length: int, right: Tensor, left: Tensor) -> None:
    """`rows_y` may be `rows_u`."""
    batch, channels, stride = rows_u.shape
    plan = plan_for(_log2_size(length))
    spectrum = _kernel_spectrum(right, left, plan.log2_size)
    blocks, groups = _grid(plan, batch, channels, rows_u.device)
    load("convolution.cu", "convolve", plan, 1, rows_u.device)(
        *(blocks, plan.threads, rows_u, rows_y, spectrum, *tables(plan.log2_size, rows_u.device)),
        *(batch, length, stride, channels, groups),
    )


def plan_for(log2_size: int) -> Plan:
    """16 points a thread, 512 threads a multiprocessor in blocks of 128 or more: every thread has
    128 registers, for the kernel or the sum over the batch.
    """
    channels = 2 ** max(0, 11 - log2_size)
    threads = channels * 2**log2_size // 16
    return Plan(log2_size, channels, threads, blocks=512 // threads)


def _grid(plan: Plan, batch: int, channels: int, device: torch.device) -> tuple[int, int]:
    """Blocks, and the groups of sequences: all blocks are there at once, if they can."""
    spans = -(-channels // plan.channels)
    groups = max(1, min(batch, _multiprocessors(device) * plan.blocks // spans))
    return spans * groups, groups


# ---------------------------------------------------------------------------------- layout


def to_rows(*tensors: Tensor) -> list[Tensor]:
    """[B, L, H] -> fp32 [B, H, L or a little more], of one tensor or two in one launch."""
    batch, length, channels = tensors[0].shape
    tensors = tuple(x.contiguous() for x in tensors)
    shape, device = (batch, channels, row_stride(length)), tensors[0].device
    rows = [torch.empty(shape, dtype=torch.float32, device=device) for _ in tensors]
    blocks = batch * -(-length // 128) * -(-channels // 32)
    _load_layout("to_rows", tensors[0].dtype, device)(
        *(blocks * len(tensors), 256, tensors[0], tensors[-1], rows[0], rows[-1]),
        *(length, channels, shape[2], _aligned(*tensors), blocks),
    )
    return rows


def from_rows(rows: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """The first `length` entries of rows [B, H, .] -> [B, L, H] in `dtype`."""
    batch, channels, stride = rows.shape
    y = torch.empty((batch, length, channels), dtype=dtype, device=rows.device)
    blocks = batch * -(-length // 128) * -(-channels // 32)
    _load_layout("from_rows", dtype, rows.device)(
        *(blocks, 256, rows, y, length, channels, stride, _aligned(y))
    )
    return y


def row_stride(length: int) -> int:
    """A row begins at an address that a vector may have."""
    return -(-length // 4) * 4


def _aligned(*tensors: Tensor) -> int:
    """Four channels lie on an address that a vector may have."""
    return int(all(x.shape[2] % 4 == 0 and x.data_ptr() % 16 == 0 for x in tensors))


def _load_layout(name: str, dtype: torch.dtype, device: torch.device) -> nvrtc.Kernel:
    bits, is_bf16 = STORAGE[dtype]
    defines = ("STORAGE_BITS", bits), ("STORAGE_IS_BF16", is_bf16), ("THREADS", 256)
    return nvrtc.load(("device.cuh", "layout.cu"), name, defines, 0, device.index)


# ---------------------------------------------------------------------------------- kernels


def _kernel_spectrum(right: Tensor, left: Tensor, log2_size: int) -> Tensor:
    plan = _kernel_plan(log2_size)
    right, left = right.contiguous(), left.contiguous()
    spectrum = right.new_empty(right.shape[0], plan.size, 2)
    load("kernel.cu", "kernel_spectrum", plan, 1, right.device)(
        *(right.shape[0], plan.threads, right, left, spectrum),
        *(*tables(log2_size, right.device), right.shape[1], left.shape[1], right.shape[0]),
    )
    return spectrum


def _kernel_gradient(
    partial: Tensor, right: Tensor, left: Tensor, log2_size: int
) -> tuple[Tensor, Tensor]:
    plan = _kernel_plan(log2_size)
    d_right = right.new_empty(right.shape)
    d_left = left.new_empty(left.shape)
    channels = right.shape[0]
    load("kernel.cu", "kernel_gradient", plan, 1, right.device)(
        *(channels, plan.threads, partial, d_right, d_left, *tables(log2_size, right.device)),
        *(right.shape[1], left.shape[1], channels, partial.shape[0]),
    )
    return d_right, d_left


def _kernel_plan(log2_size: int) -> Plan:
    return Plan(log2_size, channels=1, threads=2**log2_size // 16, blocks=1)


def load(file: str, name: str, plan: Plan, signals: int, device: torch.device) -> nvrtc.Kernel:
    """A kernel that transforms, with shared memory for so many signals."""
    files = ("device.cuh", "butterflies.cuh", "fft.cuh", file)
    return nvrtc.load(files, name, plan.defines, plan.bytes(signals), device.index)


# ---------------------------------------------------------------------------------- tables


def _log2_size(length: int) -> int:
    return max(SHORTEST, (length - 1).bit_length())


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def middle_radices(log2_size: int) -> tuple[int, int]:
    """N = 16 A B 16, as in fft.cuh."""
    first = 16 if log2_size == 12 else min(8, 2 ** (log2_size - 8))
    return first, 2 ** (log2_size - 8) // first


@cache
def tables(log2_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """`(w_M^i, w_M^4i)` of each pass, `w_M = exp(-2 pi i / M)`, and `w_4N^i`; made in float64."""
    size, blocks = 2**log2_size, 2**log2_size
    powers = []
    for radix in (16, *middle_radices(log2_size)):
        stride = blocks // radix
        i = torch.arange(stride, dtype=torch.float64)
        powers.append(torch.cat((roots(i / blocks), roots(4 * i / blocks)), dim=1))
        blocks = stride
    twist = roots(torch.arange(size // 16, dtype=torch.float64) / (4 * size))
    return torch.cat(powers).float().to(device), twist.float().to(device)


def roots(turns: Tensor) -> Tensor:
    """`exp(-2 pi i turns)` as pairs."""
    angle = -2 * torch.pi * turns
    return torch.stack((angle.cos(), angle.sin()), dim=-1)
