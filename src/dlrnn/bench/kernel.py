"""`dlrnn bench kernel`: how right the kernel and its gradients are at a long length, and how fast.

The truth is float64: sums over blocks of positions, with every phase from one exponential.
"""

from typing import Any

import torch
from torch import Tensor

from dlrnn import ops
from dlrnn.bench.measure import median_ms, relative_error, require_right, seconds

BLOCK = 2**12
TOLERANCE = 1e-5


def bench_kernel(
    *, d_model: int, d_state: int, length: int, device: str, repeats: int
) -> dict[str, Any]:
    """Relative errors in fp32 with |lambda| > 1 - 1e-6, and the median ms of forward + backward.

    `naive` is the error of `exp(k log lambda)` in fp32 over the last positions.
    """
    where = torch.device(device)
    generator = torch.Generator().manual_seed(1)
    re = (torch.rand(d_state, generator=generator) * 1e-6).sqrt()
    im = 2 * torch.pi * torch.rand(d_state, generator=generator)
    W = torch.randn(d_model, d_state, 2, generator=generator) / d_state
    dK = torch.randn(d_model, length, generator=generator).to(where)
    re, im, W = (p.to(where).requires_grad_() for p in (re, im, W))

    def run() -> tuple[Tensor, ...]:
        log_lambda = torch.stack((-(re.double() ** 2), im.double()), dim=-1)
        kernel = ops.vandermonde(W, log_lambda, length)
        return kernel.detach(), *torch.autograd.grad(kernel, (re, im, W), dK)

    truth = exact_kernel_and_gradients(re, im, W, dK)
    names = ("kernel", "log_lambda_re", "log_lambda_im", "W")
    errors = {
        name: relative_error(have, want)
        for name, have, want in zip(names, run(), truth, strict=True)
    }
    require_right(errors, TOLERANCE)
    tail = torch.arange(max(0, length - 64), length, device=where)
    return {
        "case": {"H": d_model, "N": d_state, "L": length},
        "device": torch.cuda.get_device_name(where) if where.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "ms": round(median_ms(seconds({"run": run}, where, repeats)["run"]), 3),
        "errors": {name: float(f"{error:.2e}") for name, error in errors.items()},
        "naive": relative_error(_naive(re, im, W, tail), truth[0][:, tail]),
    }


@torch.no_grad()
def exact_kernel_and_gradients(
    re: Tensor, im: Tensor, W: Tensor, dK: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """K [H, L] and the gradients of re, im and W for the incoming gradient dK, all in float64."""
    re, im, W, dK = (t.double() for t in (re, im, W, dK))
    log_lambda, w = torch.complex(-(re**2), im), torch.view_as_complex(W)
    length, device = dK.shape[1], dK.device
    inner = torch.exp(log_lambda[:, None] * torch.arange(min(BLOCK, length), device=device))
    kernel, moments, slopes = torch.empty_like(dK), torch.zeros_like(w), torch.zeros_like(w)
    for start in range(0, length, BLOCK):
        outer = torch.exp(log_lambda * start)
        piece = dK[:, start : start + BLOCK]
        P = inner[:, : piece.shape[1]]
        kernel[:, start : start + BLOCK] = ((w * outer) @ P).real
        position = torch.arange(start, start + piece.shape[1], device=device)
        moments += piece.to(P.dtype) @ P.mT * outer
        slopes += (piece * position).to(P.dtype) @ P.mT * outer
    slope = (w * slopes).sum(0)
    dW = torch.stack((moments.real, -moments.imag), dim=-1)
    return kernel, -2 * re * slope.real, -slope.imag, dW


@torch.no_grad()
def _naive(re: Tensor, im: Tensor, W: Tensor, position: Tensor) -> Tensor:
    P = torch.exp(torch.complex(-(re**2), im)[:, None] * position)
    return (torch.view_as_complex(W) @ P).real
