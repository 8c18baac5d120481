"""`dlrnn check`: whether a layer gives the same answer whole, in chunks and step by step."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dlrnn.bench.measure import relative_error
from dlrnn.nn import DLR, load_layers

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}
PADDED = {torch.float64: 1e-10, torch.float32: 1e-5}
CHUNKS = (1, 7, 64)
FORMS: dict[str, dict[str, Any]] = {
    "real": {},
    "prod, by pairs": {"cast": "prod"},
    "prod, online": {"cast": "prod", "d_state": 40},
    "restricted": {"kernel_length": 100},
    "restricted prod": {"cast": "prod", "kernel_length": 100},
    "glu": {"glu": True},
    "bidirectional": {"bidirectional": True},
}


def find_checkpoint(path: Path) -> Path:
    """The file, the best model of a run directory, or the only safetensors file of a folder."""
    if not path.is_dir():
        return path
    if (best := path / "best.safetensors").is_file():
        return best
    files = sorted(path.rglob("*.safetensors"))
    if len(files) != 1:
        found = f"{len(files)}: name one of {', '.join(map(str, files))}" if files else "none"
        raise ValueError(f"{path} should hold one .safetensors file, and holds {found}")
    return files[0]


def check_file(
    path: Path, lengths: list[int], cast: str | None, kernel_length: int | None
) -> list[dict[str, Any]]:
    """`check_layer` of every layer in a file: one row for each layer, dtype and length."""
    layers = load_layers(find_checkpoint(path), cast=cast, kernel_length=kernel_length)
    return [
        {"layer": name or "(layer)", **check_layer(layer, dtype, length)}
        for name, layer in layers.items()
        for dtype in TOLERANCE
        for length in lengths
    ]


def check_forms(lengths: list[int]) -> list[dict[str, Any]]:
    """`check_layer` of new layers that stream in every way, with |lambda| between 0.99 and 1."""
    rows = []
    for form, options in FORMS.items():
        torch.manual_seed(0)
        layer = DLR(8, **{"d_state": 16, "dt_min": 1e-6, "dt_max": 1e-2, **options})
        rows += [
            {"layer": form, **check_layer(layer, dtype, length)}
            for dtype in TOLERANCE
            for length in lengths
        ]
    return rows


def check_layer(layer: DLR, dtype: torch.dtype, length: int) -> dict[str, Any]:
    """The difference to the whole sequence relative to its norm; None where it cannot stream."""
    parameters = layer.state_dict()
    layer = DLR(**layer.options()).to(dtype).eval()
    layer.load_state_dict(parameters)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, length, layer.d_model, generator=generator, dtype=dtype)
    with torch.no_grad():
        whole = layer(x)
        padded = torch.nn.functional.pad(x, (0, 0, 0, 13), value=1.0)
        errors: dict[str, float | None] = {
            "padded": relative_error(
                layer(padded, lengths=torch.tensor([length]))[:, :length], whole
            ),
            "chunks": None,
            "steps": None,
        }
        if not layer.bidirectional:
            errors["chunks"] = relative_error(_in_chunks(layer, x), whole)
            errors["steps"] = relative_error(_in_steps(layer, x), whole)
    streamed = [errors[name] for name in ("chunks", "steps")]
    ok = all(error is None or error <= TOLERANCE[dtype] for error in streamed)
    ok = ok and errors["padded"] is not None and errors["padded"] <= PADDED[dtype]
    return {"dtype": str(dtype).removeprefix("torch."), "length": length, **errors, "ok": ok}


def _in_chunks(layer: DLR, x: Tensor) -> Tensor:
    state, outputs, start = None, [], 0
    for size in (*CHUNKS, x.shape[1]):
        chunk = x[:, start : start + size]
        if chunk.shape[1]:
            y, state = layer(chunk, state, return_state=True)
            outputs.append(y)
        start += size
    return torch.cat(outputs, dim=1)


def _in_steps(layer: DLR, x: Tensor) -> Tensor:
    state, outputs = None, []
    for x_t in x.unbind(1):
        y, state = layer.step(x_t, state)
        outputs.append(y)
    return torch.stack(outputs, dim=1)
