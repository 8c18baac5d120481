"""`dlrnn doctor`: what this machine has, and whether ops and layers are right on it."""

import platform
import sys
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

from dlrnn import ops
from dlrnn._version import __version__
from dlrnn.bench.measure import relative_error, timed
from dlrnn.nn import DLR, load_layers
from dlrnn.ops import dispatch, reference
from dlrnn.ops.cuda import nvrtc
from dlrnn.ops.dplr import DPLR, dplr_kernel
from dlrnn.ops.dplr_recurrence import dplr_step

TOLERANCE = 1e-5


def environment() -> dict[str, str]:
    """Versions and devices."""
    cuda, precision = torch.cuda.is_available(), torch.get_float32_matmul_precision()
    return {
        "dlrnn": __version__,
        "python": f"{sys.version.split()[0]} on {platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "cpu": f"{torch.get_num_threads()} threads",
        "cuda": torch.cuda.get_device_name() if cuda else "no device",
        "kernels": kernels_of(
            nvrtc.capability(torch.device("cuda", 0)) if cuda and nvrtc.available() else None
        ),
        "triton": "installed" if find_spec("triton") else "not installed",
        "matmul precision": precision + ("" if precision == "highest" else " (errors near 3e-4)"),
    }


KNOWN = {
    **dict.fromkeys([(8, 0), (8, 6)], "portable; tested and timed as PTX on an H200"),
    (9, 0): "those for Hopper; measured on an H200",
    **dict.fromkeys([(8, 9), (10, 0), (12, 0)], "portable; compiled, never run"),
}


def kernels_of(capability: tuple[int, int] | None) -> str:
    """Which CUDA C++ kernels a GPU of this compute capability runs, and what is known of them."""
    if capability is None:
        return "none: plain PyTorch"
    if capability < (8, 0):
        return "none: CUDA C++ needs compute capability 8.0"
    version = "{}.{}".format(*capability)
    return f"compute capability {version}: {KNOWN.get(capability, 'portable; never compiled')}"


# ---------------------------------------------------------------------------------- ops

ROWS, STATES, LENGTH, WIDE = 3, 8, 300, 16
Function = Callable[..., Any]


def examine(device: str) -> list[dict[str, Any]]:
    """One row an op: its backend, why, and its error and time on a small case."""
    where = torch.device(device)
    cases = _cases()
    dispatch.require_request()
    return [_examine(op, where, *cases[op]) for op in dispatch.OPS]


def _examine(
    op: str, device: torch.device, function: Function, definition: Function, *arguments: Any
) -> dict[str, Any]:
    run = partial(function, *tree_map_only(Tensor, partial(Tensor.to, device=device), arguments))
    try:
        with dispatch.recorded() as choices:
            run()
    except ValueError as problem:  # a requested backend that is not there
        why = str(problem)
        return {"op": op, "backend": None, "why": why, "error": None, "ms": None, "ok": False}
    none = dispatch.Choice(op, "torch", "the op made no choice")
    choice = next((each for each in choices if each.op == op), none)
    seconds, value = timed(run, device)
    truth = definition(*tree_map_only(Tensor, _double, arguments))
    error = relative_error(_last(value).cpu(), _last(truth))
    return {
        "op": op,
        "backend": choice.backend,
        "why": choice.reason,
        "error": error,
        "ms": 1e3 * seconds,
        "ok": error <= TOLERANCE,
    }


def _double(values: Tensor) -> Tensor:
    return values.double() if values.is_floating_point() else values


def _last(value: Any) -> Tensor:
    """A result, or the last of several."""
    found: Tensor = value[-1] if isinstance(value, tuple) else value
    return found


def _cases() -> dict[str, tuple[Any, ...]]:
    """For each op a function, its definition in float64, and the arguments of both."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    W, v, dt = random(ROWS, STATES, 2), random(ROWS, LENGTH), random(ROWS).abs() + 0.1
    unit = torch.rand(STATES, 2, generator=generator, dtype=torch.float64)
    shared = unit * torch.tensor([-1e-3, 6.3])
    own = torch.stack([shared / (1 + row) for row in range(ROWS)])
    u, kernel = random(2, LENGTH, WIDE), random(WIDE, LENGTH)
    weight, bias = random(WIDE, WIDE), random(WIDE)
    P, B = random(2, STATES, 2).double()
    system = DPLR(shared, P, B, W.double()[None], dt.double())
    step = random(1, 1, ROWS), W, shared, random(1, ROWS, STATES, 2)
    heads, positions = random(2, LENGTH, 3, WIDE), torch.arange(LENGTH)[None]
    of_reference: dict[str, tuple[Any, ...]] = {
        "vandermonde": (W, shared, LENGTH),
        "vandermonde_adjoint": (v, shared),
        "channel_vandermonde": (W, own, LENGTH),
        "channel_adjoint": (v, own),
        "convolution": (random(2, LENGTH, ROWS), v),
        "rotate": (heads, positions),
    }
    return {
        **{op: (getattr(ops, op), getattr(reference, op), *a) for op, a in of_reference.items()},
        "mix": (ops.mix, _exact_mix, u, kernel, None, weight, bias),
        "layer_norm": (_layer_norm, _exact_layer_norm, u, u.flip(1), weight[0], bias),
        "thin_linear": (ops.linear, F.linear, random(LENGTH, ROWS), random(32, ROWS), random(32)),
        "zero_order_hold": (ops.zero_order_hold, _exact_gain, shared, dt),
        "sections": (dplr_kernel, _exact_dplr_kernel, system, LENGTH),
        "step": (_step, _exact_step, *step),
    }


def _exact_mix(u: Tensor, kernel: Tensor, _: None, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(F.gelu(reference.convolution(u, kernel)), weight, bias)


def _layer_norm(x: Tensor, added: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return ops.layer_norm(x, weight, bias, added=added)


def _exact_layer_norm(x: Tensor, added: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x + added, weight.shape, weight, bias)


def _exact_gain(Lambda: Tensor, dt: Tensor) -> Tensor:
    slopes = torch.view_as_complex(Lambda)
    return torch.view_as_real(((dt[:, None] * slopes).exp() - 1) / slopes)


def _exact_dplr_kernel(system: DPLR, length: int) -> Tensor:
    """The recurrence itself, without an input after the first."""
    u, state = torch.ones(1, ROWS).double(), torch.zeros(1, ROWS, STATES, 2).double()
    outputs = []
    for _ in range(length):
        y, state = dplr_step(u, system, state)
        u = torch.zeros_like(u)
        outputs.append(y)
    return torch.stack(outputs, dim=-1)


def _step(u: Tensor, W: Tensor, log_lambda: Tensor, state: Tensor) -> Tensor:
    return torch.cat([x.flatten() for x in ops.step(u[:, 0], W, log_lambda, state)])


def _exact_step(*arguments: Tensor) -> Tensor:
    return torch.cat([x.flatten() for x in reference.recurrence(*arguments)])


# ---------------------------------------------------------------------------------- layers

STREAMED = {torch.float64: 1e-10, torch.float32: 1e-4}
PADDED = {torch.float64: 1e-10, torch.float32: 1e-5}
CUTS = (1, 8, 72)  # where a sequence is cut into chunks
FORMS: dict[str, dict[str, Any]] = {
    "real": {},
    "prod, by pairs": {"cast": "prod"},
    "prod, online": {"cast": "prod", "d_state": 40},
    "restricted": {"kernel_length": 100},
    "restricted prod": {"cast": "prod", "kernel_length": 100},
    "glu": {"glu": True},
    "bidirectional": {"bidirectional": True},
}


def new_layers() -> dict[str, DLR]:
    """Layers that stream in every way, with |lambda| between 0.99 and 1."""
    torch.manual_seed(0)
    common = {"d_state": 16, "dt_min": 1e-6, "dt_max": 1e-2}
    return {form: DLR(8, **(common | options)) for form, options in FORMS.items()}


def saved_layers(path: Path, **options: Any) -> dict[str, DLR]:
    """The layers of a file, of the best model of a run, or of a folder's only safetensors file."""
    best = path / "best.safetensors"
    if path.is_dir() and not best.is_file():
        files = sorted(path.rglob("*.safetensors"))
        if len(files) != 1:
            found = f"{len(files)}: name one of {', '.join(map(str, files))}" if files else "none"
            raise ValueError(f"{path} should hold one .safetensors file, and holds {found}")
        path = files[0]
    elif path.is_dir():
        path = best
    return {name or "(layer)": layer for name, layer in load_layers(path, **options).items()}


def compare(layers: dict[str, DLR], lengths: list[int], device: str) -> list[dict[str, Any]]:
    """Whether each layer gives the same answer whole, padded, in chunks and step by step."""
    return [
        {"layer": name, **_compare(deepcopy(layer).to(device, dtype), length)}
        for name, layer in layers.items()
        for dtype in STREAMED
        for length in lengths
    ]


@torch.no_grad()
def _compare(layer: DLR, length: int) -> dict[str, Any]:
    """The difference to the whole sequence relative to its norm; None where it cannot stream."""
    generator, (dtype, device) = torch.Generator().manual_seed(0), (layer.D.dtype, layer.D.device)
    x = torch.randn(1, length, layer.d_model, generator=generator, dtype=dtype).to(device)
    whole = layer.eval()(x)
    padded = F.pad(x, (0, 0, 0, 13), value=1.0)
    part = layer(padded, lengths=torch.tensor([length], device=device))[:, :length]
    errors = {"padded": relative_error(part, whole)}
    allowed = {"padded": PADDED[dtype], "chunks": STREAMED[dtype], "steps": STREAMED[dtype]}
    if not layer.bidirectional:
        errors["chunks"] = relative_error(_in_chunks(layer, x), whole)
        errors["steps"] = relative_error(_in_steps(layer, x), whole)
    ok = all(error <= allowed[name] for name, error in errors.items())
    shown = {name: errors.get(name) for name in allowed}
    return {"dtype": str(dtype).removeprefix("torch."), "length": length, **shown, "ok": ok}


def _in_chunks(layer: DLR, x: Tensor) -> Tensor:
    state, outputs = None, []
    for chunk in x.tensor_split(CUTS, dim=1):
        if chunk.shape[1]:
            y, state = layer(chunk, state, return_state=True)
            outputs.append(y)
    return torch.cat(outputs, dim=1)


def _in_steps(layer: DLR, x: Tensor) -> Tensor:
    state, outputs = None, []
    for x_t in x.unbind(1):
        y, state = layer.step(x_t, state)
        outputs.append(y)
    return torch.stack(outputs, dim=1)
