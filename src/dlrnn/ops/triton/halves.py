"""fp32 numbers as two fp16 numbers, `x = high + low`, and their products on tensor cores."""
# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from typing import no_type_check

import triton
import triton.language as tl


@triton.jit
@no_type_check
def _halves(x):
    """`x = high + low` in 16 bits each."""
    high = x.to(tl.float16)
    return high, (x - high.to(tl.float32)).to(tl.float16)


@triton.jit
@no_type_check
def _multiply(a_high, a_low, b_high, b_low, total):
    """`total + a b`: the small products first, of which the sum then loses nothing."""
    total = tl.dot(a_low, b_high, total)
    total = tl.dot(a_high, b_low, total)
    return tl.dot(a_high, b_high, total)
