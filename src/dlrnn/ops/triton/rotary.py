"""Rotary positions: pairs of channels are rotated by angles that depend on the position.

It takes one pass over memory, where PyTorch takes eight. A program handles a few positions with all
heads and computes in fp32 for every dtype. Backward is the same with negated angles.
"""
# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from dlrnn.common.device import on_its_device

TILE, WARPS = 2048, 4  # pairs of a program
WIDEST = 2048  # pairs of a position


def supports(x: Tensor) -> bool:
    """fp32, bf16 or fp16 [B, L, heads, d], not empty, d even."""
    _, _, heads, d = x.shape
    known = x.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return known and d % 2 == 0 and heads * d // 2 <= WIDEST and x.numel() > 0


@on_its_device
def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs of x [B, L, heads, d], of any strides; cos and sin are [B or 1, L, d/2]."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    batch, length, heads, d = x.shape
    out, half = x.new_empty(x.shape), d // 2
    width = triton.next_power_of_2(heads * half)
    rows, height = batch * length, max(1, TILE // width)
    per_sequence = cos.shape[0] > 1
    _turn[(triton.cdiv(rows, height),)](
        *(x, cos.contiguous(), sin.contiguous(), out, rows, length, *x.stride()[:3]),
        *(per_sequence, heads, half, height, width),
        num_warps=WARPS,
    )
    return out


@triton.jit(do_not_specialize=["rows", "length"])
@no_type_check
def _turn(  # noqa: PLR0917
    x, cos, sin, out, rows, length, batch_stride, row_stride, head_stride,
    PER_SEQUENCE: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0).to(tl.int64) * HEIGHT + tl.arange(0, HEIGHT))[:, None]
    pair = tl.arange(0, WIDTH)[None, :]
    head, i = pair // HALF, pair % HALF
    known = (row < rows) & (head < HEADS)
    position = row % length
    table = (row if PER_SEQUENCE else position) * HALF + i
    c = tl.load(cos + table, mask=known, other=0.0)
    s = tl.load(sin + table, mask=known, other=0.0)
    at = x + (row // length) * batch_stride + position * row_stride
    at += head.to(tl.int64) * head_stride + i
    a = tl.load(at, mask=known, other=0.0).to(tl.float32)
    b = tl.load(at + HALF, mask=known, other=0.0).to(tl.float32)
    to = out + (row * HEADS + head) * (2 * HALF) + i
    tl.store(to, (a * c - b * s).to(out.dtype.element_ty), mask=known)
    tl.store(to + HALF, (a * s + b * c).to(out.dtype.element_ty), mask=known)
