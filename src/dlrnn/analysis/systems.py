"""DLRs as systems `(lambda, w)`: products of kernels, DLR-prod as a DLR, linear RNNs as DLRs.

Everything here is complex128 on the CPU and carries no gradient.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from dlrnn import ops
from dlrnn.nn import DLR
from dlrnn.ops.checks import require, require_dtype, require_shape, require_tensor

# log |lambda| of a lambda of 0: exp(-1024) is exactly 0 in float64, and its zeroth power is 1. In a
# layer log_lambda_re = sqrt(1024) = 32 is exact in every precision.
LOG_ZERO = -1024.0
ROUNDING = 1e-13  # |lambda| up to this far above 1 is rounded to 1
CONDITION = 1e7  # of eigenvectors: 1e7 x 2e-16 leaves the kernel about 8 digits


@dataclass(frozen=True, eq=False)
class System:
    """A DLR before the cast: `K_k = sum_n w_hn lambda_n^k`, complex."""

    lam: Tensor  # complex128 [N]
    w: Tensor  # complex128 [H, N]

    def __post_init__(self) -> None:
        require_shape("lam", self.lam, ("N",))
        require_shape("w", self.w, ("H", self.lam.shape[0]))
        for name, values in (("lam", self.lam), ("w", self.w)):
            require(values.numel() >= 1, f"{name} is empty: a system has at least one state")
            require_dtype(name, values, (torch.complex128,))
            _require_finite(name, values)

    def kernel(self, length: int) -> Complex[Tensor, "H {length}"]:
        """`K_k` for k = 0 .. length-1, with `0^0 = 1`; no tensor larger than w or K is made."""
        parts = ops.complex_vandermonde(torch.view_as_real(self.w), log_pairs(self.lam), length)
        return torch.complex(parts[0], parts[1])


def log_pairs(lam: Complex[Tensor, " N"]) -> Float[Tensor, "N 2"]:
    """`log lambda` as pairs (log |lambda|, phase)."""
    return torch.stack((lam.abs().log().clamp(min=LOG_ZERO), lam.angle()), dim=-1)


def _require_systems(name: str, *values: object) -> None:
    for value in values:
        expected = f"{name} takes systems, not a {type(value).__name__}"
        require(isinstance(value, System), f"{expected}: use `system_of(layer)`")


# ---------------------------------------------------------------------------------- layers


def system_of(layer: DLR) -> System:
    """The layer's `lambda` and `w`, without its cast, its kernel_length and D.

    A bidirectional layer has 2 H rows of w.
    """
    require(isinstance(layer, DLR), f"system_of takes a DLR layer, not a {type(layer).__name__}")
    W, log_lambda, _ = (pairs.detach().cpu().double() for pairs in layer.modes())
    lam = ops.powers(log_lambda, torch.ones(()))
    return System(torch.view_as_complex(lam), torch.view_as_complex(W.contiguous()))


def layer_of(system: System, *, bidirectional: bool = False) -> DLR:
    """A float64 layer `y = conv(Re K, u)`: project=False and D = 0.

    With `bidirectional` the second half of the rows reads from right to left, as in `system_of`.
    """
    _require_systems("layer_of", system)
    rows, states = system.w.shape
    channels, odd = divmod(rows, 2 if bidirectional else 1)
    expected = "a bidirectional layer needs an even number of rows of w, two a channel"
    require(not odd, f"{expected}, not {rows}")
    with torch.device("meta"):  # draws no random numbers
        layer = DLR(channels, states, bidirectional=bidirectional, project=False)
    layer.double().to_empty(device="cpu")
    write_modes(layer, system)
    torch.nn.init.zeros_(layer.D)
    return layer


def write_modes(layer: DLR, system: System) -> None:
    """Set the parameters of a complex layer of the same size so that its kernel is `Re(K)`."""
    largest = system.lam.abs().max().item()
    require(
        largest <= 1 + ROUNDING,
        f"a DLR layer has |lambda| <= 1, and the largest |lambda| of this system is {largest:.15g}",
    )
    log_modulus, phase = log_pairs(system.lam).unbind(-1)
    assert layer.log_lambda_im is not None
    with torch.no_grad():
        layer.log_lambda_re.copy_(log_modulus.clamp(max=0).neg().sqrt())
        layer.log_lambda_im.copy_(phase)
        layer.W.copy_(torch.view_as_real(system.w))


# ---------------------------------------------------------------------------------- products


def kronecker(a: System, b: System) -> System:
    """The system `lambda (x) lambda'`, `w (x) w'` of each channel, whose kernel is `K_k K'_k`."""
    _require_systems("kronecker", a, b)
    channels, others = len(a.w), len(b.w)
    expected = "both factors must have the same number of channels"
    require(channels == others, f"{expected}, not {channels} and {others}")
    lam = torch.outer(a.lam, b.lam).flatten()
    return System(lam, (a.w[:, :, None] * b.w[:, None, :]).flatten(1))


def prod_as_dlr(system: System) -> System:
    """DLR-prod as a DLR of N (N + 1) / 2 states, whose `Re(kernel)` is `Re(K) Im(K)`."""
    _require_systems("prod_as_dlr", system)
    w, log_lambda = ops.prod_modes(torch.view_as_real(system.w), log_pairs(system.lam))
    lam = ops.powers(log_lambda, torch.ones(()))
    return System(torch.view_as_complex(lam), torch.view_as_complex(w))


def prod_as_dlr_full(system: System) -> System:
    """DLR-prod as the paper writes it, with 4 N^2 states, whose kernel is `Re(K) Im(K)`.

    This is the Kronecker product of two systems of 2 N states, `lambda` and its conjugate: one with
    the kernel `Re(K) = (K + conj K) / 2`, one with `Im(K) = (K - conj K) / 2i`.
    """
    _require_systems("prod_as_dlr_full", system)
    lam = torch.cat((system.lam, system.lam.conj()))
    real_part = System(lam, torch.cat((system.w, system.w.conj()), dim=1) / 2)
    imaginary_part = System(lam, torch.cat((system.w, -system.w.conj()), dim=1) / 2j)
    return kronecker(real_part, imaginary_part)


# ---------------------------------------------------------------------------------- linear RNNs


def from_linear_rnn(A: Tensor, B: Tensor, C: Tensor) -> System:
    """The DLR of `x_k = A x_{k-1} + B u_k`, `y_k = C x_k`, real or complex.

    With `A = V diag(lambda) V^-1` the kernel `C A^k B` is `sum_n w_n lambda_n^k`,
    `w = (C V) * (V^-1 B)`. A [N, N], B [N] or [N, 1], C [H, N] or [N].
    """
    for name, matrix in (("A", A), ("B", B), ("C", C)):
        require_tensor(name, matrix)
        _require_finite(name, matrix)
    N = len(A) if A.dim() else 0
    square = A.shape == (N, N) and N >= 1
    require(square, f"A must be square, [N, N] with N >= 1, not {list(A.shape)}")
    expected = f"B must have the shape [{N}] or [{N}, 1], as A has, not {list(B.shape)}"
    require(tuple(B.shape) in ((N,), (N, 1)), expected)
    expected = f"C must have the shape [H, {N}] or [{N}], as A has, not {list(C.shape)}"
    require(C.dim() in (1, 2) and C.shape[-1] == N, expected)
    # A real A gives conjugate pairs exactly.
    A = A.detach().cpu().to(torch.complex128 if A.is_complex() else torch.float64)
    B, C = (matrix.detach().cpu().to(torch.complex128) for matrix in (B, C))
    lam, V = torch.linalg.eig(A)
    condition = torch.linalg.cond(V).item()
    require(
        condition <= CONDITION,
        f"A cannot be diagonalised, or not safely: the condition number of its eigenvectors is"
        f" {condition:.1e}, and it must be at most {CONDITION:.0e}",
    )
    return System(lam, (C.reshape(-1, N) @ V) * torch.linalg.solve(V, B.reshape(N)))


def _require_finite(name: str, values: Tensor) -> None:
    finite = bool(values.isfinite().all())
    require(finite, f"{name} holds a NaN or an infinity: every value must be finite")
