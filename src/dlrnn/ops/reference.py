"""The oracle: the paper's equations as loops over float64 numbers. Slow, obvious, never used.

Every function takes the same arguments as the fast one of the same name and is differentiable by
plain autograd, so that a test can compare values and gradients. Letters as in the paper:
`log_lambda` [N, 2] ([H, N, 2] where each channel has its own) and `W` [H, N, 2] are pairs (re, im);
K is the kernel, u the input, x the state.
"""

import torch
from torch import Tensor


def _complex(pairs: Tensor) -> Tensor:
    return torch.complex(pairs[..., 0].double(), pairs[..., 1].double())


def vandermonde(W: Tensor, log_lambda: Tensor, length: int) -> Tensor:
    """`K_k = Re(sum_n W_n lambda_n^k)`, for k = 0 .. length-1; W [..., N, 2] -> K [..., length]."""
    W, log_lambda = _complex(W), _complex(log_lambda)
    kernel = [(W * torch.exp(log_lambda * k)).sum(-1).real for k in range(length)]
    return torch.stack(kernel, dim=-1)


def vandermonde_adjoint(v: Tensor, log_lambda: Tensor) -> Tensor:
    """`M_n = sum_k v_k lambda_n^k`; v [..., L] -> M [..., N, 2]."""
    v, log_lambda = v.double(), _complex(log_lambda)
    moments = torch.zeros(*v.shape[:-1], log_lambda.shape[0], dtype=torch.complex128)
    for k in range(v.shape[-1]):
        moments = moments + v[..., k, None] * torch.exp(log_lambda * k)
    return torch.view_as_real(moments)


def channel_vandermonde(W: Tensor, log_lambda: Tensor, length: int) -> Tensor:
    """The same with a lambda for each channel; W [..., H, N, 2], log_lambda [H, N, 2]."""
    rows = [vandermonde(W[..., h, :, :], own, length) for h, own in enumerate(log_lambda)]
    return torch.stack(rows, dim=-2)


def channel_adjoint(v: Tensor, log_lambda: Tensor) -> Tensor:
    """`M_hn = sum_k v_hk lambda_hn^k`; v [..., H, L] -> M [..., H, N, 2]."""
    rows = [vandermonde_adjoint(v[..., h, :], own) for h, own in enumerate(log_lambda)]
    return torch.stack(rows, dim=-3)


def convolution(u: Tensor, right: Tensor, left: Tensor | None = None) -> Tensor:
    """`y_i = sum_{j<=i} right_{i-j} u_j + sum_{j>i} left_{j-i-1} u_j`; u, y [B, L, H]."""
    u, right = u.double(), right.double()
    left = right[:, :0] if left is None else left.double()
    length = u.shape[1]
    y = []
    for i in range(length):
        y_i = torch.zeros_like(u[:, 0])
        for j in range(length):
            if 0 <= i - j < right.shape[1]:
                y_i = y_i + right[:, i - j] * u[:, j]
            if 0 <= j - i - 1 < left.shape[1]:
                y_i = y_i + left[:, j - i - 1] * u[:, j]
        y.append(y_i)
    return torch.stack(y, dim=1)


def recurrence(
    u: Tensor, W: Tensor, log_lambda: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`x_k = lambda x_{k-1} + u_k`, `y_k = Re <W, x_k>`; u, y [B, L, H], state [B, H, N, 2]."""
    W, log_lambda, u = _complex(W), _complex(log_lambda), u.double()
    lam = torch.exp(log_lambda)
    batch, length, channels = u.shape
    x = torch.zeros(batch, channels, lam.shape[-1], dtype=torch.complex128)
    if state is not None:
        x = _complex(state)
    y = []
    for k in range(length):
        x = lam * x + u[:, k, :, None]
        y.append((W * x).sum(-1).real)
    return torch.stack(y, dim=1), torch.view_as_real(x)


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """`(a_k + i b_k) exp(i position 10000^(-k / half))`; the halves of a head are a and b.

    x [B, L, heads, d], positions [B, L] or [1, L].
    """
    half = x.shape[-1] // 2
    parts = []
    for k in range(half):
        angle = positions.double() * 10000.0 ** (-k / half)
        z = torch.complex(x[..., k].double(), x[..., half + k].double())
        parts.append(z * torch.exp(1j * angle)[..., None])
    z = torch.stack(parts, dim=-1)
    return torch.cat((z.real, z.imag), dim=-1)
