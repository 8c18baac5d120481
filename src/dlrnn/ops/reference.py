"""The slow definitions that every fast op is tested against.

`dlr_listing` is the whole layer but for its output stage, as the paper lists it. The other
functions are the paper's equations as loops over float64 numbers. Each takes the same arguments as
the fast op of its name and is differentiable by plain autograd, so that a test can compare values
and gradients. Letters as in the paper: `log_lambda` [N, 2] ([H, N, 2] where each channel has its
own) and `W` [H, N, 2] are pairs (re, im); K is the kernel, u the input, x the state.
"""

import torch
from torch import Tensor


def dlr_listing(  # noqa: PLR0917
    u: Tensor,
    log_lambda_re: Tensor,
    log_lambda_im: Tensor,
    W: Tensor,
    D: Tensor,
    bidirectional: bool = False,
) -> Tensor:
    """`y = conv(K, u) + D u` in the paper's twenty lines; u, y [B, L, H].

    They make the whole matrix P and leave the gradients to autograd. A bidirectional layer has 2 H
    rows in W; the second half reads from right to left.
    """
    H, L = u.shape[2], u.shape[1]
    log_lambda = -(log_lambda_re**2) + 1j * log_lambda_im  # [N]
    P = (log_lambda[:, None] * torch.arange(L, device=u.device)).exp()  # [N, L]
    K = ((W[..., 0] + 1j * W[..., 1]) @ P).real  # [H, L], or [2 H, L]
    if bidirectional:
        K = torch.cat((K[:H], K[H:].flip(-1)), dim=-1)  # [H, 2 L]
    K_f = torch.fft.rfft(K, n=2 * L)
    u_f = torch.fft.rfft(u.transpose(1, 2), n=2 * L)
    y = torch.fft.irfft(K_f * u_f, n=2 * L)[..., :L]  # [B, H, L]
    out: Tensor = y.transpose(1, 2) + D * u
    return out


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


def tape(
    v: Tensor, write: Tensor, read: Tensor, c: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`S_nk = S_n,k-1 + v_k e^(2 pi i n write_k)`, `y_k = Re sum_n c_n e^(2 pi i n read_k) S_nk^*`.

    S^* is the conjugate. v, y [B, L, heads, D], angles [B, L, heads] in turns, c [heads, G, N, 2]
    for G groups of D / G channels, state [B, heads, D, N, 2].
    """
    v, write, read = v.double(), write.double(), read.double()
    batch, length, heads, channels = v.shape
    kernels = _complex(c).repeat_interleave(channels // c.shape[1], dim=1)  # [heads, D, N]
    n = 2 * torch.pi * torch.arange(c.shape[2], dtype=torch.float64)
    S = torch.zeros(batch, heads, channels, c.shape[2], dtype=torch.complex128)
    if state is not None:
        S = _complex(state)
    y = []
    for k in range(length):
        written = torch.exp(1j * n * write[:, k, :, None])  # [B, heads, N]
        S = S + v[:, k, :, :, None] * written[:, :, None]
        reader = torch.exp(1j * n * read[:, k, :, None])
        y.append((kernels * reader[:, :, None] * S.conj()).sum(-1).real)
    return torch.stack(y, dim=1), torch.view_as_real(S)
