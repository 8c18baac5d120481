"""Convolution of up to 16384 positions, forward and backward: rows in, one kernel, rows out.

The meaning is that of `ops.convolution`'s own functions; convolution.cu has the mathematics. A row
is one ring of up to 4096 points, or two, three or four of 4096 (rings.cuh).
"""

from functools import cache

import torch
from torch import Tensor

from dlrnn.ops.cuda import nvrtc
from dlrnn.ops.cuda.rings import SHORTEST, Rows, ring_tables, rows_for

LONGEST = 14  # log2 of a row's entries
HOPPER_BYTES = 232448  # of shared memory that a block may have
STORAGE = {torch.float32: (32, 0), torch.bfloat16: (16, 1), torch.float16: (16, 0)}


def supports(u: Tensor, right: Tensor, left: Tensor) -> bool:
    """fp32 kernels, u in fp32, bf16 or fp16, on a Hopper GPU or later, lengths up to 16384."""
    return (
        u.is_cuda
        and u.dtype in STORAGE
        and right.dtype == left.dtype == torch.float32
        and bool(2**SHORTEST // 2 < u.shape[1] <= 2**LONGEST)
        and bool(u.numel() > 0)
        and torch.cuda.get_device_capability(u.device) >= (9, 0)
        and nvrtc.available()
        and _fits(u, right, left)
    )


def _fits(u: Tensor, right: Tensor, left: Tensor) -> bool:
    """Into a block's shared memory: a Hopper GPU's fits all, and asks for no plan, which would tie
    a compiled graph to the length.
    """
    room = _shared_bytes(u.device)
    return room >= HOPPER_BYTES or rows_for(u.shape[1], right, left).largest_bytes <= room


def forward(u: Tensor, right: Tensor, left: Tensor) -> Tensor:
    """`y_i = sum_{j<=i} right_{i-j} u_j + sum_{j>i} left_{j-i-1} u_j`."""
    rows = empty_rows(u)
    _forward(u, right, left, rows, rows)
    return from_rows(rows, u.shape[1], u.dtype)


def forward_rows(u: Tensor, right: Tensor, left: Tensor) -> tuple[Tensor, Tensor]:
    """`forward`, as rows, and u's rows, which `backward_rows` wants."""
    rows_y, rows_u = empty_rows(u), empty_rows(u)
    _forward(u, right, left, rows_u, rows_y)
    return rows_y, rows_u


def _forward(u: Tensor, right: Tensor, left: Tensor, rows_u: Tensor, rows_y: Tensor) -> None:
    """Into both, which may be one."""
    u, plan = u.contiguous(), rows_for(u.shape[1], right, left)
    spectrum = _kernel_spectrum(right, left, plan)
    to_rows(u, beside=rows_u)
    _convolve(rows_u, rows_y, u.shape[1], spectrum, plan)


def backward(dy: Tensor, u: Tensor, right: Tensor, left: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of u and of both kernels."""
    return backward_of_rows(dy.to(u.dtype), to_rows(u), right, left)


def backward_of_rows(
    dy: Tensor, rows_u: Tensor, right: Tensor, left: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`backward`, from u's rows; they stay."""
    dy, rows_u = dy.contiguous(), nvrtc.aligned(rows_u)
    rows_dy, du = empty_rows(dy), torch.empty(dy.shape, dtype=dy.dtype, device=dy.device)
    spectrum = _kernel_spectrum(right, left, rows_for(dy.shape[1], right, left))
    to_rows(dy, beside=rows_dy)
    return _backward(rows_dy, rows_u, du, (right, left), spectrum)


def backward_rows(
    rows_dy: Tensor, rows_u: Tensor, length: int, right: Tensor, left: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The same from dy's rows too, which are used up; du is no longer in rows."""
    rows_dy, rows_u = nvrtc.aligned(rows_dy), nvrtc.aligned(rows_u)
    du = rows_u.new_empty(rows_u.shape[0], length, rows_u.shape[1])
    spectrum = _kernel_spectrum(right, left, rows_for(length, right, left))
    return _backward(rows_dy, rows_u, du, (right, left), spectrum)


def _backward(
    rows_dy: Tensor, rows_u: Tensor, du: Tensor, kernels: tuple[Tensor, Tensor], spectrum: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Beside du's transpose the kernels' gradient is made, or the points of its rings."""
    length = du.shape[1]
    plan = rows_for(length, *kernels)
    d_right, d_left = (kernel.new_empty(kernel.shape) for kernel in kernels)
    partial = _correlate(rows_dy, rows_u, length, spectrum, plan)
    if plan.alone:
        _kernel_gradient(partial, d_right, d_left, plan)
        from_rows(rows_dy, length, du.dtype, beside=du)
    else:
        _kernel_points(partial, plan)
        from_rows(rows_dy, length, du.dtype, beside=du)
        _kernel_entries(partial, d_right, d_left, plan)
    return du, d_right, d_left


def _correlate(
    rows_dy: Tensor, rows_u: Tensor, length: int, spectrum: Tensor, plan: Rows
) -> Tensor:
    """Makes du of dy; what groups of sequences add to the kernels' gradient, as spectra."""
    batch, channels, stride = rows_u.shape
    blocks, groups = _grid(plan, batch, channels, rows_u.device)
    partial = spectrum.new_empty(groups, channels, plan.size, 2)
    _load(plan, "convolve_backward", plan.teams, plan.backward_bytes, rows_u.device)(
        *(blocks, plan.teams * plan.members, rows_dy, rows_u, rows_dy, spectrum, partial),
        *(*ring_tables(plan, rows_u.device), *_kept(plan, 2 * blocks, partial)),
        *(batch, length, stride, channels, groups),
    )
    return partial


def _convolve(rows_u: Tensor, rows_y: Tensor, length: int, spectrum: Tensor, plan: Rows) -> None:
    batch, channels, stride = rows_u.shape
    blocks, groups = _grid(plan, batch, channels, rows_u.device)
    _load(plan, "convolve", plan.teams, plan.forward_bytes, rows_u.device)(
        *(blocks, plan.teams * plan.members, rows_u, rows_y, spectrum),
        *(*ring_tables(plan, rows_u.device), *_kept(plan, blocks, spectrum)),
        *(batch, length, stride, channels, groups),
    )


def _kept(plan: Rows, count: int, like: Tensor) -> list[Tensor]:
    """Where blocks of many rings keep the points of their teams."""
    return [like.new_empty(count, plan.teams, plan.ring, 2)] if plan.many else []


def _grid(plan: Rows, batch: int, channels: int, device: torch.device) -> tuple[int, int]:
    """Blocks, and the groups of sequences: all blocks are there at once, if they can."""
    room = _multiprocessors(device) * plan.blocks // channels
    groups = max(1, min(-(-batch // (plan.teams if plan.alone else 1)), room))
    return channels * groups, groups


def _load(
    plan: Rows, name: str, teams: int, shared_bytes: int, device: torch.device
) -> nvrtc.Kernel:
    defines = (
        nvrtc.STARTS_EARLY,
        ("STORAGE_BITS", 32),
        ("LOG2M", plan.ring.bit_length() - 1),
        ("RINGS", plan.rings),
        ("PARTS", plan.entries // plan.ring),
        ("TEAMS", teams),
        ("BLOCKS", plan.blocks),
    )
    file = "many_rings.cu" if plan.many else "convolution.cu"
    file = "kernel.cu" if name.startswith("kernel") else file
    files = ("device.cuh", "butterflies.cuh", "rings.cuh", file)
    return nvrtc.load(files, name, defines, shared_bytes, device.index)


# ---------------------------------------------------------------------------------- layout


# What runs beside the launch before it does not wait for that one: it must read nothing that one
# writes, and write only where memory had been allocated, and inputs copied, before that launch.


def to_rows(x: Tensor, beside: Tensor | None = None) -> Tensor:
    """[B, L, H] -> fp32 [B, H, L or a little more]; into `beside`, if it may run beside the launch
    before.
    """
    (batch, length, channels), x = x.shape, x.contiguous()
    rows = empty_rows(x) if beside is None else beside
    blocks = batch * -(-length // 128) * -(-channels // 32)
    _load_layout("to_rows", x.dtype, x.device)(
        *(blocks, 256, x, rows, length, channels, rows.shape[2], _aligned(x)),
        int(beside is not None),
    )
    return rows


def from_rows(
    rows: Tensor, length: int, dtype: torch.dtype, beside: Tensor | None = None
) -> Tensor:
    """The first `length` entries of rows [B, H, .] -> [B, L, H] in `dtype`; into `beside`, if it
    may run beside the launch before.
    """
    batch, channels, stride = rows.shape
    y = beside
    if y is None:
        y = torch.empty((batch, length, channels), dtype=dtype, device=rows.device)
    blocks = batch * -(-length // 128) * -(-channels // 32)
    _load_layout("from_rows", dtype, rows.device)(
        *(blocks, 256, rows, y, length, channels, stride, _aligned(y), int(beside is not None))
    )
    return y


def empty_rows(x: Tensor) -> Tensor:
    """Room for the rows of x."""
    shape = x.shape[0], x.shape[2], row_stride(x.shape[1])
    return torch.empty(shape, dtype=torch.float32, device=x.device)


def row_stride(length: int) -> int:
    """A row begins at an address that a vector may have."""
    return -(-length // 4) * 4


def _aligned(x: Tensor) -> int:
    """Four channels lie on an address that a vector may have."""
    return int(x.shape[2] % 4 == 0 and x.data_ptr() % 16 == 0)


def _load_layout(name: str, dtype: torch.dtype, device: torch.device) -> nvrtc.Kernel:
    bits, is_bf16 = STORAGE[dtype]
    storage = ("STORAGE_BITS", bits), ("STORAGE_IS_BF16", is_bf16)
    defines = (nvrtc.STARTS_EARLY, *storage, ("THREADS", 256))
    return nvrtc.load(("device.cuh", "layout.cu"), name, defines, 0, device.index)


# ---------------------------------------------------------------------------------- kernels


def _kernel_spectrum(right: Tensor, left: Tensor, plan: Rows) -> Tensor:
    channels, right, left = right.shape[0], right.contiguous(), left.contiguous()
    spectrum = right.new_empty(channels, plan.size, 2)
    _load_kernel(plan, "kernel_spectrum", right.device)(
        *_tasks(plan, channels),
        *(right, left, spectrum, ring_tables(plan, right.device)[0]),
        *(right.shape[1], left.shape[1], channels),
    )
    return spectrum


def _kernel_gradient(partial: Tensor, d_right: Tensor, d_left: Tensor, plan: Rows) -> None:
    groups, channels = partial.shape[:2]
    _load_kernel(plan, "kernel_gradient", partial.device)(
        *_tasks(plan, channels),
        *(partial, d_right, d_left, *ring_tables(plan, partial.device)),
        *(d_right.shape[1], d_left.shape[1], channels, groups),
    )


def _kernel_points(partial: Tensor, plan: Rows) -> None:
    """In place of the first group's spectra."""
    groups, channels = partial.shape[:2]
    _load_kernel(plan, "kernel_points", partial.device)(
        *(*_tasks(plan, channels), partial, *ring_tables(plan, partial.device), channels, groups)
    )


def _kernel_entries(points: Tensor, d_right: Tensor, d_left: Tensor, plan: Rows) -> None:
    channels, threads = d_right.shape[0], plan.members
    _load(plan, "kernel_entries", plan.kernel_teams, 0, points.device)(
        *(channels * plan.ring // (2 * threads), threads, points, d_right, d_left),
        *(ring_tables(plan, points.device)[0], d_right.shape[1], d_left.shape[1]),
    )


def _tasks(plan: Rows, channels: int) -> tuple[int, int]:
    """Blocks and threads: a team for each ring of each channel."""
    return -(-channels * plan.rings // plan.kernel_teams), plan.kernel_teams * plan.members


def _load_kernel(plan: Rows, name: str, device: torch.device) -> nvrtc.Kernel:
    return _load(plan, name, plan.kernel_teams, plan.bytes(plan.kernel_teams), device)


# ---------------------------------------------------------------------------------- the device


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _shared_bytes(device: torch.device) -> int:
    """Of a block, if PyTorch tells; a Hopper GPU's else."""
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", HOPPER_BYTES)
