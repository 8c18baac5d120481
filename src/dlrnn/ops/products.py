"""DLRs whose kernel is the product of two DLR kernels."""

import torch
from jaxtyping import Float
from torch import Tensor

from dlrnn.ops.pairs import pair_product


def prod_modes(
    W: Float[Tensor, "H N 2"], log_lambda: Float[Tensor, "N 2"]
) -> tuple[Float[Tensor, "H M 2"], Float[Tensor, "M 2"]]:
    """DLR-prod as a DLR over the M = N (N + 1) / 2 pairs m <= n.

    `Re(K) Im(K) = Im(K^2) / 2 = Re(sum_{m<=n} w_mn (lambda_m lambda_n)^k)` with
    `w_mn = -i W_m W_n`, halved for m = n.
    """
    m, n = torch.triu_indices(W.shape[1], W.shape[1], device=W.device)
    product = pair_product(W[:, m], W[:, n])
    minus_i = torch.stack((product[..., 1], -product[..., 0]), dim=-1)
    weight = 1 - 0.5 * (m == n).to(W.dtype)
    return minus_i * weight[:, None], log_lambda[m] + log_lambda[n]
