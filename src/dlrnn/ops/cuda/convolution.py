"""Convolution of up to 16384 positions in the channel-major layout, forward and backward.

    y_i = sum_{j<=i} right_{i-j} u_j + sum_{j>i} left_{j-i-1} u_j

The functions have the meaning of those of `ops.convolution`; convolution.cu has the mathematics.
"Rows" are sequences in the channel-major layout, [B, H, stride] with stride >= L: `to_rows` and
`from_rows` transpose from and to [B, L, H]. They are stored in fp32, bf16 or fp16; sequences in the
dtype of the rows or in fp32. Arithmetic is fp32. One kernel transforms a row by a negacyclic FFT,
multiplies by the spectrum of the convolution kernels, and transforms back.
"""

import torch
from torch import Tensor

from dlrnn.common.device import multiprocessors
from dlrnn.ops.cuda import nvrtc
from dlrnn.ops.cuda.negacyclic_fft import SHORTEST, RowPlan, plan_for, residue_tables
from dlrnn.ops.cuda.nvrtc import ceil_div

LONGEST = 14  # log2 of a row's entries
STORAGE: dict[torch.dtype, nvrtc.Defines] = {
    torch.float32: (("STORAGE_BITS", 32),),
    torch.bfloat16: (("STORAGE_BITS", 16), ("STORAGE_IS_BF16", 1)),
    torch.float16: (("STORAGE_BITS", 16), ("STORAGE_IS_BF16", 0)),
}
"""How the sources are told in which dtype tensors are stored."""


def supports(u: Tensor, right: Tensor, left: Tensor) -> bool:
    """fp32 kernels, u in fp32, bf16 or fp16, compute capability 8.0 or later, 129 to 16384
    positions; without a plan, which would tie a compiled graph to one length.
    """
    return takes(u, right, left, SHORTEST, LONGEST)


def takes(u: Tensor, right: Tensor, left: Tensor, shortest: int, longest: int) -> bool:
    """Whether dtypes, device and length are supported; bounds are log2 of the rounded length."""
    return (
        u.is_cuda
        and u.dtype in STORAGE
        and right.dtype == left.dtype == torch.float32
        and bool(2**shortest // 2 < u.shape[1] <= 2**longest)
        and nvrtc.runs_on(u)
    )


def forward(u: Tensor, right: Tensor, left: Tensor) -> Tensor:
    """y, [B, L, H]."""
    rows = empty_rows(u, u.dtype)
    _forward(u, right, left, None, rows, rows, None)
    return from_rows(rows, u.shape[1], u.dtype)


def forward_rows(  # noqa: PLR0917
    u: Tensor,
    right: Tensor,
    left: Tensor,
    skip: Tensor | None,
    dtype: torch.dtype,
    keep: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """The rows of `y + skip u` in `dtype`, and those of u, from which `backward_rows` computes
    gradients; with `keep`, for which `dtype` must be bf16, also the spectra of u.
    """
    rows_y, rows_u = empty_rows(u, dtype), empty_rows(u, dtype)
    kept = rows_y.new_empty(spectra_shape(u, right, left) if keep else 0)
    _forward(u, right, left, skip, rows_u, rows_y, kept if keep else None)
    return rows_y, rows_u, kept


def spectra_shape(u: Tensor, right: Tensor, left: Tensor) -> tuple[int, int, int, int]:
    """The shape of the spectra of u: complex numbers as pairs."""
    return u.shape[0], u.shape[2], plan_for(u.shape[1], right, left).size, 2


def _forward(  # noqa: PLR0917
    u: Tensor,
    right: Tensor,
    left: Tensor,
    skip: Tensor | None,
    rows_u: Tensor,
    rows_y: Tensor,
    kept: Tensor | None,
) -> None:
    """Write the rows of u and y, which may be the same memory, and the spectra of u to `kept`."""
    u, plan = u.contiguous(), plan_for(u.shape[1], right, left)
    spectrum = _kernel_spectrum(right, left, skip, plan)
    to_rows(u, overlap=rows_u)
    _convolve("convolve", (rows_u, rows_y, spectrum), kept, u.shape[1], plan)


def backward(dy: Tensor, u: Tensor, right: Tensor, left: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of u and of both kernels."""
    return backward_of_rows(dy.to(u.dtype), to_rows(u), right, left, None)


def backward_of_rows(
    dy: Tensor, rows_u: Tensor, right: Tensor, left: Tensor, skip: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """`backward` from the rows of u, which stay unchanged."""
    dy, rows_u = dy.contiguous(), nvrtc.aligned(rows_u)
    rows_dy, du = (
        empty_rows(dy, rows_u.dtype),
        torch.empty(dy.shape, dtype=dy.dtype, device=dy.device),
    )
    spectrum = _kernel_spectrum(right, left, skip, plan_for(dy.shape[1], right, left))
    to_rows(dy, overlap=rows_dy)
    return _backward(rows_dy, rows_u, du, (right, left), spectrum, None)


def backward_rows(  # noqa: PLR0917
    rows_dy: Tensor,
    rows_u: Tensor,
    kept: Tensor,
    length: int,
    right: Tensor,
    left: Tensor,
    skip: Tensor | None,
    dtype: torch.dtype,
    gradients: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`backward` from the rows of dy, which are overwritten, and of u, or from the spectra of u
    unless `kept` is empty; du is in `dtype`.

    The gradients of the kernels are written to `gradients`, if given.
    """
    rows_dy, rows_u = nvrtc.aligned(rows_dy), nvrtc.aligned(rows_u)
    du = rows_u.new_empty(rows_u.shape[0], length, rows_u.shape[1], dtype=dtype)
    spectrum = _kernel_spectrum(right, left, skip, plan_for(length, right, left))
    spectra = nvrtc.aligned(kept) if kept.numel() else None
    return _backward(rows_dy, rows_u, du, (right, left), spectrum, spectra, gradients)


def _backward(  # noqa: PLR0917
    rows_dy: Tensor,
    rows_u: Tensor,
    du: Tensor,
    kernels: tuple[Tensor, Tensor],
    spectrum: Tensor,
    kept: Tensor | None,
    gradients: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients; the transpose of du overlaps with the gradients of the kernels."""
    length = du.shape[1]
    plan = plan_for(length, *kernels)
    d_right, d_left = gradients or (kernel.new_empty(kernel.shape) for kernel in kernels)
    groups, (channels, device) = _groups(rows_u, plan), (rows_u.shape[1], rows_u.device)
    partial = spectrum.new_empty(groups, channels, plan.size, 2)
    tensors = rows_dy, rows_u, rows_dy, spectrum, partial
    _convolve("convolve_backward", tensors, kept, length, plan)
    lengths, tables = (d_right.shape[1], d_left.shape[1]), residue_tables(plan, device)
    if plan.one_team_per_row:
        _load_kernel(plan, "kernel_gradient", partial)(
            *(*_tasks(plan, channels), partial, d_right, d_left, *tables),
            *(*lengths, channels, groups),
        )
        from_rows(rows_dy, length, du.dtype, overlap=du)
    else:
        _load_kernel(plan, "kernel_gradient_points", partial)(
            *(*_tasks(plan, channels), partial, *tables, channels, groups)
        )
        from_rows(rows_dy, length, du.dtype, overlap=du)
        threads = plan.team_size
        _load(plan, "kernel_gradient_entries", plan.kernel_teams, 0, partial)(
            *(channels * plan.residue_size // (2 * threads), threads, partial, d_right, d_left),
            *(tables[0], *lengths),
        )
    return du, d_right, d_left


def _convolve(
    name: str, tensors: tuple[Tensor, ...], kept: Tensor | None, length: int, plan: RowPlan
) -> None:
    """Launch `convolve` or `convolve_backward`; the first two tensors are rows."""
    rows, is_forward = tensors[0], name == "convolve"
    (batch, channels, stride), groups = rows.shape, _groups(rows, plan)
    blocks, saved = channels * groups, tensors[:0]
    if plan.multi_residue:  # global memory for the points of the teams
        count = blocks if is_forward else 2 * blocks
        saved = (tensors[-1].new_empty(count, plan.teams, plan.residue_size, 2),)
    shared_bytes = plan.forward_bytes if is_forward else plan.backward_bytes
    _load(plan, name, plan.teams, shared_bytes, rows, kept is not None)(
        *(blocks, plan.teams * plan.team_size),
        *(*tensors, 0 if kept is None else kept, *residue_tables(plan, rows.device), *saved),
        *(batch, length, stride, channels, groups),
    )


def _groups(rows: Tensor, plan: RowPlan) -> int:
    """Groups of sequences, so that all blocks run at the same time if possible."""
    batch, channels, _ = rows.shape
    most = multiprocessors(rows.device) * plan.blocks // channels
    return max(1, min(ceil_div(batch, plan.teams if plan.one_team_per_row else 1), most))


# ---------------------------------------------------------------------------------- layout


# A transpose that may overlap with the previous launch does not wait for it: it must read nothing
# that this launch writes, and write only memory that was allocated before it.


def to_rows(x: Tensor, overlap: Tensor | None = None) -> Tensor:
    """Rows of x [B, L, H]; written to `overlap`, if the previous launch may still be running."""
    (batch, length, channels), x = x.shape, x.contiguous()
    rows = empty_rows(x, x.dtype) if overlap is None else overlap
    _transpose("to_channel_major", x.dtype, rows)(
        *(batch * ceil_div(length, 128) * ceil_div(channels, 32), 256, x, rows),
        *(length, channels, rows.shape[2], _is_vectorised(x), int(overlap is not None)),
    )
    return rows


def from_rows(
    rows: Tensor, length: int, dtype: torch.dtype, overlap: Tensor | None = None
) -> Tensor:
    """[B, L, H] in `dtype` from rows; written to `overlap`, if the previous launch may still be
    running.
    """
    batch, channels, stride = rows.shape
    y = overlap
    if y is None:
        y = torch.empty((batch, length, channels), dtype=dtype, device=rows.device)
    _transpose("from_channel_major", dtype, rows)(
        *(batch * ceil_div(length, 128) * ceil_div(channels, 32), 256, rows, y),
        *(length, channels, stride, _is_vectorised(y), int(overlap is not None)),
    )
    return y


def empty_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Memory for the rows of x."""
    shape = x.shape[0], x.shape[2], row_stride(x.shape[1])
    return torch.empty(shape, dtype=dtype, device=x.device)


def row_stride(length: int | torch.SymInt) -> int | torch.SymInt:
    """The length rounded up, so that each row is aligned for vectors of 16 bytes."""
    return -(-length // 8) * 8


def _is_vectorised(x: Tensor) -> int:
    """Whether each four channels are aligned for a vector access."""
    return int(x.shape[2] % 4 == 0 and x.data_ptr() % 16 == 0)


# ---------------------------------------------------------------------------------- kernels


def _kernel_spectrum(right: Tensor, left: Tensor, skip: Tensor | None, plan: RowPlan) -> Tensor:
    channels, right, left = right.shape[0], right.contiguous(), left.contiguous()
    spectrum = right.new_empty(channels, plan.size, 2)
    _load_kernel(plan, "kernel_spectrum", right)(
        *_tasks(plan, channels),
        *(right, left, 0 if skip is None else skip.contiguous(), spectrum),
        *(residue_tables(plan, right.device)[0], right.shape[1], left.shape[1], channels),
    )
    return spectrum


def _tasks(plan: RowPlan, channels: int) -> tuple[int, int]:
    """Blocks and threads: a team for each residue of each channel."""
    blocks = ceil_div(channels * plan.residues, plan.kernel_teams)
    return blocks, plan.kernel_teams * plan.team_size


def _load_kernel(plan: RowPlan, name: str, x: Tensor) -> nvrtc.Kernel:
    return _load(plan, name, plan.kernel_teams, plan.bytes(plan.kernel_teams), x)


def _load(  # noqa: PLR0917
    plan: RowPlan, name: str, teams: int, shared_bytes: int, stored: Tensor, keeps: bool = False
) -> nvrtc.Kernel:
    """A kernel for tensors like `stored`, and one that `keeps` the spectra of u or reads them."""
    defines = (
        nvrtc.PROGRAMMATIC_LAUNCH,
        *STORAGE[stored.dtype],
        ("LOG2M", plan.residue_size.bit_length() - 1),
        ("RESIDUES", plan.residues),
        ("SEGMENTS", plan.entries // plan.residue_size),
        ("TEAMS", teams),
        ("BLOCKS", plan.blocks),
        *(() if name.startswith("kernel") else (("STAGED", int(plan.staged)),)),
        *((("KEPT", 1),) if keeps else ()),
    )
    file = "convolution_multi_residue.cu" if plan.multi_residue else "convolution.cu"
    file = "kernel_spectrum.cu" if name.startswith("kernel") else file
    files = ("device.cuh", "butterflies.cuh", "negacyclic_fft.cuh", file)
    return nvrtc.load(files, name, defines, shared_bytes, stored.device.index)


def _transpose(name: str, dtype: torch.dtype, rows: Tensor) -> nvrtc.Kernel:
    """A transpose between sequences in `dtype`, which is fp32 or that of the rows, and rows."""
    defines = (nvrtc.PROGRAMMATIC_LAUNCH, *STORAGE[rows.dtype], ("THREADS", 256))
    if dtype != rows.dtype:
        defines += (("SEQUENCES_IN_FP32", 1),)
    return nvrtc.load(("device.cuh", "transpose.cu"), name, defines, 0, rows.device.index)
