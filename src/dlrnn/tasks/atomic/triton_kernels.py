"""The two Triton kernels that generate batches on a GPU: MIPS and orthonormal matrices."""
# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from dlrnn.common.device import on_its_device

QUERIES, KEYS = 8, 512  # a tile of products


@on_its_device
def largest_product(query: Tensor, key: Tensor) -> Tensor:
    """Return `argmax_{j <= i} <q_i, k_j>` of queries and keys [B, L, D], int64 [B, L]."""
    batch, length, width = query.shape
    best = torch.empty(batch, length, dtype=torch.int64, device=query.device)
    tiles = triton.next_power_of_2(triton.cdiv(length, KEYS))
    _search[(triton.cdiv(length, QUERIES), batch)](
        *(query.contiguous(), key.mT.contiguous(), best, length, width, QUERIES, KEYS, tiles),
        num_warps=4,
    )
    return best


@triton.jit
@no_type_check
def _search(  # noqa: PLR0917
    query, key, best,
    LENGTH: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """For a block of queries: find the largest product of each lane, then its position."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # the block with the most keys first
    i, lane = block * ROWS + tl.arange(0, ROWS), tl.arange(0, LANES)
    query += (tl.program_id(1) * LENGTH + i) * WIDTH
    key += tl.program_id(1) * WIDTH * LENGTH
    q = ()
    for d in tl.static_range(WIDTH):
        q += (tl.load(query + d, mask=i < LENGTH, other=0.0)[:, None],)
    largest = tl.full((ROWS, LANES), -float("inf"), tl.float32)
    for start in range(0, LENGTH, LANES):
        if start + LANES <= block * ROWS:
            product = tl.zeros((ROWS, LANES), tl.float32)
            for d in tl.static_range(WIDTH):
                product += q[d] * tl.load(key + d * LENGTH + start + lane)[None, :]
            largest = tl.maximum(largest, product)
    j = block * ROWS // LANES * LANES + lane  # the keys around the queries themselves
    product = tl.zeros((ROWS, LANES), tl.float32)
    for d in tl.static_range(WIDTH):
        k = tl.load(key + d * LENGTH + j, mask=j < LENGTH, other=0.0)
        product += q[d] * k[None, :]
    later = j[None, :] > i[:, None]
    largest = tl.maximum(largest, tl.where(later, -float("inf"), product))
    # the best lane, and the best of its keys
    best_lane = tl.argmax(largest, axis=1)
    j = best_lane[:, None] + LANES * tl.arange(0, TILES)[None, :]
    known = j <= i[:, None]
    product = tl.zeros((ROWS, TILES), tl.float32)
    for d in tl.static_range(WIDTH):
        product += q[d] * tl.load(key + d * LENGTH + j, mask=known, other=0.0)
    tile = tl.argmax(tl.where(known, product, -float("inf")), axis=1)
    place = (best_lane + LANES * tile).to(tl.int64)
    tl.store(best + tl.program_id(1) * LENGTH + i, place, mask=i < LENGTH)


@on_its_device
def product_of_reflections(vectors: Tensor) -> Tensor:
    """Return `(I - 2 v_1 v_1^T) ... (I - 2 v_K v_K^T)` of unit vectors, the rows of [B, K, N]."""
    batch, count, size = vectors.shape
    product = vectors.new_empty(batch, size, size)
    width = triton.next_power_of_2(size)
    rows = min(4, width)
    _reflect[(triton.cdiv(size, rows), batch)](
        vectors.contiguous(), product, count, size, rows, width, num_warps=1
    )
    return product


@triton.jit
@no_type_check
def _reflect(  # noqa: PLR0917
    vectors, product,
    COUNT: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Apply the reflections, one after the other, to ROWS rows of the identity."""
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    x = (row[:, None] == column[None, :]).to(vectors.dtype.element_ty)
    vectors += tl.program_id(1) * COUNT * SIZE + column
    for k in range(COUNT):
        v = tl.load(vectors + k * SIZE, mask=column < SIZE, other=0.0)[None, :]
        x -= 2 * tl.sum(x * v, axis=1)[:, None] * v
    inside = (row < SIZE)[:, None] & (column < SIZE)[None, :]
    to = product + (tl.program_id(1) * SIZE + row[:, None]) * SIZE + column[None, :]
    tl.store(to, x, mask=inside)
