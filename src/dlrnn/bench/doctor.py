"""`dlrnn doctor`: what this machine has, which backend each op uses, proven by running it."""

import platform
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from dlrnn import ops
from dlrnn._version import __version__
from dlrnn.ops import dispatch, reference
from dlrnn.ops.dplr import DPLR, dplr_kernel
from dlrnn.ops.dplr_recurrence import dplr_step

TOLERANCE = 1e-5


def environment() -> dict[str, str]:
    """Versions and devices."""
    cuda = torch.cuda.is_available()
    return {
        "dlrnn": __version__,
        "python": f"{sys.version.split()[0]} on {platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "cpu": f"{torch.get_num_threads()} threads",
        "cuda": torch.cuda.get_device_name() if cuda else "no device",
        "triton": "installed" if find_spec("triton") else "not installed",
        "matmul precision": torch.get_float32_matmul_precision()
        + ("" if torch.get_float32_matmul_precision() == "highest" else " (errors near 3e-4)"),
    }


def examine(device: str) -> list[dict[str, Any]]:
    """One row an op: its backend, why, and its error and time on a small case."""
    where = torch.device(device)
    return [_examine(op, where, case(where)) for op, case in _CASES.items()]


def _examine(
    op: str, device: torch.device, case: tuple[Callable[[], Tensor], Callable[[], Tensor]]
) -> dict[str, Any]:
    run, expected = case
    try:
        with dispatch.recorded() as choices:
            run()
    except ValueError as problem:  # a requested backend that is not there
        return {
            "op": op,
            "backend": None,
            "why": str(problem),
            "error": None,
            "ms": None,
            "ok": False,
        }
    none = dispatch.Choice(op, "torch", "the op made no choice")
    choice = next((each for each in choices if each.op == op), none)
    start = time.perf_counter()
    value = run().cpu().double()
    milliseconds = 1e3 * (time.perf_counter() - start)
    want = expected()
    error = ((value - want).norm() / want.norm()).item()
    return {
        "op": op,
        "backend": choice.backend,
        "why": choice.reason,
        "error": error,
        "ms": milliseconds,
        "ok": error <= TOLERANCE,
    }


_Case = tuple[Callable[[], Tensor], Callable[[], Tensor]]
ROWS, STATES, LENGTH = 3, 8, 300


def _modes(device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    W = torch.randn(ROWS, STATES, 2, generator=generator)
    log_lambda = torch.rand(STATES, 2, generator=generator, dtype=torch.float64)
    return W.to(device), (log_lambda * torch.tensor([-1e-3, 6.3])).to(device)


def _signal(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(device)


def _against_reference(name: str, *arguments: Any) -> _Case:
    """An op and the reference of its name, on the same arguments."""
    on_cpu = [each.cpu() if isinstance(each, Tensor) else each for each in arguments]
    return (
        lambda: getattr(ops, name)(*arguments),
        lambda: getattr(reference, name)(*on_cpu),
    )


def _channel_modes(device: torch.device) -> tuple[Tensor, Tensor]:
    W, log_lambda = _modes(device)
    return W, torch.stack([log_lambda / (1 + row) for row in range(ROWS)])


def _vandermonde(device: torch.device) -> _Case:
    return _against_reference("vandermonde", *_modes(device), LENGTH)


def _adjoint(device: torch.device) -> _Case:
    v = _signal(device, ROWS, LENGTH)
    return _against_reference("vandermonde_adjoint", v, _modes(device)[1])


def _channel_vandermonde(device: torch.device) -> _Case:
    return _against_reference("channel_vandermonde", *_channel_modes(device), LENGTH)


def _channel_adjoint(device: torch.device) -> _Case:
    v = _signal(device, ROWS, LENGTH)
    return _against_reference("channel_adjoint", v, _channel_modes(device)[1])


def _convolution(device: torch.device) -> _Case:
    u, kernel = _signal(device, 2, LENGTH, ROWS), _signal(device, ROWS, LENGTH)
    return _against_reference("convolution", u, kernel)


def _mix(device: torch.device) -> _Case:
    rows = 16
    u, kernel = _signal(device, 2, LENGTH, rows), _signal(device, rows, LENGTH)
    weight, bias = _signal(device, rows, rows), _signal(device, rows)

    def expected() -> Tensor:
        y = torch.nn.functional.gelu(reference.convolution(u.cpu(), kernel.cpu()))
        return torch.nn.functional.linear(y, weight.cpu().double(), bias.cpu().double())

    return lambda: ops.mix(u, kernel, None, weight, bias), expected


def _layer_norm(device: torch.device) -> _Case:
    x, added = _signal(device, LENGTH, 32), _signal(device, LENGTH, 32).flip(0)
    weight, bias = _signal(device, 32), _signal(device, 32)

    def expected() -> Tensor:
        total = x.cpu().double() + added.cpu()
        scale = weight.cpu().double(), bias.cpu().double()
        return torch.nn.functional.layer_norm(total, (32,), *scale)

    return lambda: ops.layer_norm(x, weight, bias, added=added), expected


def _thin_linear(device: torch.device) -> _Case:
    x, weight, bias = _signal(device, LENGTH, 3), _signal(device, 32, 3), _signal(device, 32)

    def expected() -> Tensor:
        return x.cpu().double() @ weight.cpu().double().t() + bias.cpu()

    return lambda: ops.linear(x, weight, bias), expected


def _rotate(device: torch.device) -> _Case:
    positions = torch.arange(LENGTH, device=device)[None]
    return _against_reference("rotate", _signal(device, 2, LENGTH, 3, 16), positions)


def _zero_order_hold(device: torch.device) -> _Case:
    _, Lambda = _modes(device)
    dt = _signal(device, ROWS).abs() + 0.1

    def expected() -> Tensor:
        slopes = torch.view_as_complex(Lambda.cpu().double())
        return torch.view_as_real(((dt.cpu().double()[:, None] * slopes).exp() - 1) / slopes)

    return lambda: ops.zero_order_hold(Lambda, dt)[1], expected


def _sections(device: torch.device) -> _Case:
    C, Lambda = _modes(device)
    P, B = _signal(device, 2, STATES, 2).double()
    system = DPLR(Lambda, P, B, C.double()[None], _signal(device, ROWS).double().abs() + 0.1)

    def expected() -> Tensor:
        """The recurrence itself, without an input after the first."""
        here = DPLR(*(part.cpu() for part in system))
        u, state = torch.ones(1, ROWS).double(), torch.zeros(1, ROWS, STATES, 2).double()
        outputs = []
        for _ in range(LENGTH):
            y, state = dplr_step(u, here, state)
            u = torch.zeros_like(u)
            outputs.append(y[0])
        return torch.stack(outputs, dim=-1)

    return lambda: dplr_kernel(system, LENGTH)[0], expected


def _step(device: torch.device) -> _Case:
    u, (W, log_lambda) = _signal(device, 1, ROWS), _modes(device)
    state = _signal(device, 1, ROWS, STATES, 2)

    def results(y: Tensor, after: Tensor) -> Tensor:
        return torch.cat((y.flatten(), after.flatten()))

    return (
        lambda: results(*ops.step(u, W, log_lambda, state)),
        lambda: results(
            *reference.recurrence(u[:, None].cpu(), W.cpu(), log_lambda.cpu(), state.cpu())
        ),
    )


_CASES: dict[str, Callable[[torch.device], _Case]] = {
    "vandermonde": _vandermonde,
    "vandermonde_adjoint": _adjoint,
    "channel_vandermonde": _channel_vandermonde,
    "channel_adjoint": _channel_adjoint,
    "convolution": _convolution,
    "mix": _mix,
    "layer_norm": _layer_norm,
    "thin_linear": _thin_linear,
    "rotate": _rotate,
    "zero_order_hold": _zero_order_hold,
    "sections": _sections,
    "step": _step,
}
assert _CASES.keys() == set(dispatch.OPS)
