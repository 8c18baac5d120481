"""Two operations that have a Triton kernel on a GPU: inner product search, orthonormal matrices."""

from typing import no_type_check

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from dlrnn.tasks.numba_random import compiled

LANES = 256  # keys that are compared at once: j and j + 256 share a lane


@torch.library.custom_op("dlrnn::largest_product", mutates_args=())
def largest_product(query: Tensor, key: Tensor) -> Tensor:
    """Return `argmax_{j <= i} <q_i, k_j>` of fp32 queries and keys [B, L, D], int64 [B, L].

    No inner product is stored.
    """
    if query.is_cuda:
        from dlrnn.tasks.atomic import triton_kernels

        return triton_kernels.largest_product(query, key)
    padded = F.pad(key.cpu(), (0, 0, 0, -key.shape[1] % LANES))
    columns = padded.mT.contiguous()  # [B, D, L or a little more]
    best = torch.zeros(query.shape[:2], dtype=torch.int64)  # stays 0 if products are NaN
    _search(query.cpu().contiguous().numpy(), columns.numpy(), best.numpy())
    return best.to(query.device)


@largest_product.register_fake
def _(query: Tensor, key: Tensor) -> Tensor:
    return query.new_empty(query.shape[:2], dtype=torch.int64)


@compiled
@no_type_check
def _search(query, key, best):
    """Find the largest product of each lane, then its position in the best lane."""
    batch, length, width = query.shape
    product, largest = np.empty(LANES, np.float32), np.empty(LANES, np.float32)
    for b in range(batch):
        for i in range(length):
            largest[:] = -np.inf
            for start in range(0, i + 1, LANES):
                product[:] = 0
                for d in range(width):
                    q, k = query[b, i, d], key[b, d, start : start + LANES]
                    for t in range(LANES):
                        product[t] += q * k[t]
                product[i + 1 - start :] = -np.inf  # later than i
                for t in range(LANES):
                    largest[t] = product[t] if product[t] > largest[t] else largest[t]
            top = np.float32(-np.inf)
            for j in range(largest.argmax(), i + 1, LANES):
                value = np.float32(0)
                for d in range(width):
                    value += query[b, i, d] * key[b, d, j]
                if value > top:
                    top, best[b, i] = value, j


def orthonormal(normal: Tensor) -> Tensor:
    """Return uniformly distributed orthonormal matrices from normal numbers [..., N, N].

    They are products of reflections (Stewart 1980). Reflection k maps a normal vector of the last
    N - k coordinates to its first axis. The product of N - 1 of them, with a sign for each row, is
    distributed as the Q of a normal matrix's QR.
    """
    vectors = normal.triu()  # row k has N - k numbers
    first = vectors.diagonal(dim1=-2, dim2=-1)
    signs = torch.where(first < 0, -1.0, 1.0).to(normal.dtype)
    length = vectors.norm(dim=-1)
    vectors = vectors + torch.diag_embed(signs * length)
    vectors = vectors / vectors.norm(dim=-1, keepdim=True)
    product: Tensor = product_of_reflections(vectors)
    return -signs[..., None] * product


@torch.library.custom_op("dlrnn::product_of_reflections", mutates_args=())
def product_of_reflections(vectors: Tensor) -> Tensor:
    """Return `(I - 2 v_1 v_1^T) ... (I - 2 v_K v_K^T)` of unit vectors, the rows of [B, K, N]."""
    if vectors.is_cuda:
        from dlrnn.tasks.atomic import triton_kernels

        return triton_kernels.product_of_reflections(vectors)
    # I - V^T T V, where T is triangular and T^-1 + T^-T = V V^T
    inner = (vectors @ vectors.mT).triu(1)
    inner.diagonal(dim1=-2, dim2=-1).fill_(0.5)
    solved = torch.linalg.solve_triangular(inner, vectors, upper=True)
    eye = torch.eye(vectors.shape[-1], dtype=vectors.dtype, device=vectors.device)
    product: Tensor = eye - vectors.mT @ solved
    return product


@product_of_reflections.register_fake
def _(vectors: Tensor) -> Tensor:
    size = vectors.shape[-1]
    return vectors.new_empty(*vectors.shape[:-2], size, size)
