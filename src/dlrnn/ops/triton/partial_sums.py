"""Sums over all positions in two steps, which always add in the same order.

Each program of a kernel writes a row of partial sums; `sum_rows` adds the rows.
"""
# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from typing import no_type_check

import triton
import triton.language as tl
from torch import Tensor


def sum_rows(partial: Tensor) -> Tensor:
    """The sum over programs: [programs, columns] -> [columns]."""
    rows, columns = partial.shape
    total = partial.new_empty(columns)
    _sum_rows[(triton.cdiv(columns, 16),)](partial, total, rows, columns, 256, 16, num_warps=8)
    return total


@triton.jit(do_not_specialize=["rows"])
@no_type_check
def _sum_rows(  # noqa: PLR0917
    partial, total, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    sums = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for first in range(0, rows, ROWS):
        row = (first + tl.arange(0, ROWS))[:, None]
        known = (row < rows) & (column < columns)[None, :]
        sums += tl.load(partial + row * columns + column[None, :], mask=known, other=0.0)
    tl.store(total + column, tl.sum(sums, 0), mask=column < columns)
