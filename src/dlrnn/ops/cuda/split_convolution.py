"""Convolution of sequences of 8193 to 16384 positions: rows in halves of 8192 points (split.cuh).

16384 points would not fit into a block's registers; two rings of half the size are the same.
"""

from functools import cache

import torch
from torch import Tensor

from dlrnn.ops.cuda import nvrtc
from dlrnn.ops.cuda.convolution import (
    STORAGE,
    Plan,
    _grid,
    from_rows,
    middle_radices,
    roots,
    tables,
    to_rows,
)

PLAN = Plan(log2_size=13, channels=1, threads=512, blocks=1)
SHORTEST, LONGEST = PLAN.size + 1, 2 * PLAN.size
WORK = 8 * (PLAN.size + PLAN.size // 16)  # bytes of a transform, and of a row
ROW = 4 * 2 * PLAN.size


def supports(u: Tensor, right: Tensor, left: Tensor) -> bool:
    """fp32 kernels, u in fp32, bf16 or fp16, on a Hopper GPU or later, 8193 to 16384 positions."""
    return (
        u.is_cuda
        and u.dtype in STORAGE
        and right.dtype == left.dtype == torch.float32
        and SHORTEST <= u.shape[1] <= LONGEST
        and u.numel() > 0
        and torch.cuda.get_device_capability(u.device) >= (9, 0)
        and nvrtc.available()
    )


def forward(u: Tensor, right: Tensor, left: Tensor) -> Tensor:
    """As in `convolution`."""
    (rows,) = to_rows(u)
    _convolve(rows, rows, u.shape[1], right, left)
    return from_rows(rows, u.shape[1], u.dtype)


def backward(dy: Tensor, u: Tensor, right: Tensor, left: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As in `convolution`."""
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
    """`backward` of rows; `rows_dy` and `rows_u` stay as they are."""
    batch, channels, stride = rows_u.shape
    blocks, groups = _grid(PLAN, batch, channels, rows_u.device)
    rows_du = torch.empty_like(rows_u)
    partial = right.new_empty(groups, channels, 2, PLAN.size, 2)
    _load("split_backward.cu", "convolve_halves_backward", 2 * WORK + ROW, rows_u.device)(
        *(blocks, PLAN.threads, rows_dy, rows_u, rows_du, _kernel_halves(right, left), partial),
        *(*_tables(rows_u.device), batch, length, stride, channels, groups),
    )
    d_right, d_left = right.new_empty(right.shape), left.new_empty(left.shape)
    _load("split_kernel.cu", "kernel_halves_gradient", WORK + 2 * ROW, right.device)(
        *(channels, PLAN.threads, partial, d_right, d_left, *_tables(right.device)),
        *(right.shape[1], left.shape[1], channels, groups),
    )
    return rows_du, d_right, d_left


def _convolve(rows_u: Tensor, rows_y: Tensor, length: int, right: Tensor, left: Tensor) -> None:
    """`rows_y` may be `rows_u`."""
    batch, channels, stride = rows_u.shape
    blocks, groups = _grid(PLAN, batch, channels, rows_u.device)
    _load("split.cu", "convolve_halves", 2 * WORK + ROW, rows_u.device, teams=2)(
        *(blocks, 2 * PLAN.threads, rows_u, rows_y, _kernel_halves(right, left)),
        *(*_tables(rows_u.device), batch, length, stride, channels, groups),
    )


def _kernel_halves(right: Tensor, left: Tensor) -> Tensor:
    right, left = right.contiguous(), left.contiguous()
    spectrum = right.new_empty(right.shape[0], 2, PLAN.size, 2)
    _load("split_kernel.cu", "kernel_halves", WORK, right.device)(
        *(2 * right.shape[0], PLAN.threads, right, left, spectrum),
        *(*_tables(right.device), right.shape[1], left.shape[1]),
    )
    return spectrum


def _load(
    file: str, name: str, shared_bytes: int, device: torch.device, teams: int = 1
) -> nvrtc.Kernel:
    """A kernel with this much shared memory beside tables and barriers, in so many teams of 512."""
    files = ("device.cuh", "butterflies.cuh", "fft.cuh", "split.cuh", file)
    defines = (*PLAN.defines, ("TEAMS", teams))
    table_bytes = 16 * (PLAN.size // 16 // middle_radices(PLAN.log2_size)[0] + 16)
    return nvrtc.load(files, name, defines, shared_bytes + table_bytes + 16, device.index)


@cache
def _tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """Those of a transform of N points, with `w_8N^i` and `w_8N^3i` for its twist."""
    powers, _ = tables(PLAN.log2_size, device)
    i = torch.arange(PLAN.size // 16, dtype=torch.float64) / (8 * PLAN.size)
    return powers, torch.cat((roots(i), roots(3 * i))).float().to(device)
