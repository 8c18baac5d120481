"""The rotation of ops/rotation.py in one pass; PyTorch needs eight kernels, backward more."""
# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from typing import no_type_check

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool) -> Tensor:
    """Of x [B, L, heads, d]; cos and sin [B or 1, L, d/2] in fp32."""
    batch, length, heads, width = x.shape
    x = x.reshape(batch * length, heads * width)  # a view, if heads lie beside each other
    x = x if x.stride(1) == 1 else x.contiguous()
    out, pairs = x.new_empty(x.shape), x.numel() // 2
    _rotate[(triton.cdiv(pairs, BLOCK),)](
        *(x, cos.contiguous(), sin.contiguous(), out, pairs, x.stride(0)),
        *(cos.shape[0] * length, heads, width // 2, back, BLOCK),
    )
    return out.view(batch, length, heads, width)


@triton.jit
@no_type_check
def _rotate(  # noqa: PLR0917
    x, cos, sin, out, pairs, stride, angles,
    HEADS: tl.constexpr, HALF: tl.constexpr, BACK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = pair < pairs
    row, i = pair // (HEADS * HALF), pair % HALF
    at = pair // HALF % HEADS * (2 * HALF) + i  # in its row
    a = tl.load(x + row * stride + at, mask=there, other=0.0).to(tl.float32)
    b = tl.load(x + row * stride + at + HALF, mask=there, other=0.0).to(tl.float32)
    c = tl.load(cos + row % angles * HALF + i, mask=there, other=0.0)
    s = tl.load(sin + row % angles * HALF + i, mask=there, other=0.0)
    if BACK:
        s = -s
    to = out + row * (2 * HEADS * HALF) + at
    tl.store(to, (a * c - b * s).to(out.dtype.element_ty), mask=there)
    tl.store(to + HALF, (a * s + b * c).to(out.dtype.element_ty), mask=there)
