"""Maximum inner product search: for each query, the best key up to its own position.

No inner product is stored: numba computes them on a CPU, Triton on a GPU (triton_kernels.py).
"""

from typing import no_type_check

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from dlrnn.tasks.numba_random import compiled

LANES = 256  # keys that are compared at once: j and j + 256 share a lane


@torch.library.custom_op("dlrnn::largest_product", mutates_args=())
def largest_product(query: Tensor, key: Tensor) -> Tensor:
    """Return `argmax_{j <= i} <q_i, k_j>` of fp32 queries and keys [B, L, D], int64 [B, L]."""
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
