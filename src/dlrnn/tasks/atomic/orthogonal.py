"""Uniformly distributed orthonormal matrices, as products of reflections (Stewart 1980).

Reflection k maps a normal vector of the last N - k coordinates to its first axis. The product of
N - 1 of them, with a sign for each row, is distributed as the Q of a normal matrix's QR.
"""

import torch
from torch import Tensor


def orthonormal(normal: Tensor) -> Tensor:
    """Return [..., N, N] from standard normal numbers of the same shape; half of them are used."""
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
