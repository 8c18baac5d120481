"""Complex numbers as real pairs: a last dimension of 2 that holds (re, im).

Exponents and their tables are float64. On a device without float64 (`NO_FLOAT64`) they lie on the
CPU, and what is made of them is rounded to fp32 before it is moved to the device.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

NO_FLOAT64 = {"mps"}
"""The types of devices that have no float64 numbers."""


def has_float64(device: torch.device) -> bool:
    """Whether the device has float64 numbers."""
    return device.type not in NO_FLOAT64


def in_float64(x: Tensor) -> Tensor:
    """The tensor in float64, on the CPU if its device has no such numbers."""
    return x.to("cpu", torch.float64) if x.device.type in NO_FLOAT64 else x.double()


class DLRExponents(NamedTuple):
    """`log lambda = -re^2 + i im`, as DLR's parameters give it (`im` None: 0).

    A fused step reads the parameters themselves.
    """

    re: Float[Tensor, " N"]
    im: Float[Tensor, " N"] | None

    def log_lambda(self) -> Float[Tensor, "N 2"]:
        """The pairs (-re^2, im), in float64."""
        decay = -in_float64(self.re).square()
        phase = torch.zeros_like(decay) if self.im is None else in_float64(self.im)
        return torch.stack((decay, phase), dim=-1)


def pair_product(a: Float[Tensor, "*#s 2"], b: Float[Tensor, "*#s 2"]) -> Float[Tensor, "*_ 2"]:
    """The complex product `a b`, in real arithmetic (which compilers fuse), broadcasting."""
    a_re, a_im = a.unbind(-1)
    b_re, b_im = b.unbind(-1)
    return torch.stack((a_re * b_re - a_im * b_im, a_re * b_im + a_im * b_re), dim=-1)


def conjugate(a: Float[Tensor, "*s 2"]) -> Float[Tensor, "*s 2"]:
    """(re, im) -> (re, -im)."""
    return torch.stack((a[..., 0], -a[..., 1]), dim=-1)


def powers(log_lambda: Float[Tensor, "*n 2"], exponent: Tensor | int) -> Float[Tensor, "*_ 2"]:
    """`lambda^exponent = exp(exponent * log lambda)` as float64 pairs, broadcasting.

    The phase `exponent * Im log lambda` is formed and reduced modulo 2 pi in float64: for a
    float32 phase and an exponent below 2^29 the product is exact.
    """
    log_lambda = in_float64(log_lambda)
    decay, phase = (log_lambda * _as_factor(exponent, log_lambda.device)).unbind(-1)
    modulus = decay.exp()
    return torch.stack((modulus * phase.cos(), modulus * phase.sin()), dim=-1)


def _as_factor(exponent: Tensor | int, device: torch.device) -> Tensor | int:
    return exponent if isinstance(exponent, int) else exponent[..., None].to(device)


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
    m, n = m.to(log_lambda.device), n.to(log_lambda.device)
    return minus_i * weight[:, None], log_lambda[m] + log_lambda[n]
