"""Layers in files: safetensors, with the options of every DLR layer in the header."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from dlrnn.nn.dlr import DLR

HEADER = "dlrnn"


def save_model(model: nn.Module, path: str | Path) -> None:
    """Write the parameters of any model; beside, fsync, rename: a file is whole or not there."""
    path = Path(path)
    options = {name: m.options() for name, m in model.named_modules() if isinstance(m, DLR)}
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    content = save(tensors, metadata={HEADER: json.dumps(options)})
    handle, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        Path(beside).unlink(missing_ok=True)
        raise


def load_layers(
    path: str | Path, *, cast: str | None = None, kernel_length: int | None = None
) -> dict[str, DLR]:
    """Every DLR layer in a safetensors file, by its name in the model ("" for a lone layer).

    What the header does not say is read off the shapes; `cast` and `kernel_length` leave no trace
    there and can be given.
    """
    tensors, header = _read(Path(path))
    given = {"cast": cast, "kernel_length": kernel_length}
    layers = {}
    for key in tensors:
        if key != "log_lambda_re" and not key.endswith(".log_lambda_re"):
            continue
        name = key.removesuffix("log_lambda_re").removesuffix(".")
        prefix = f"{name}." if name else ""
        own = {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}
        own = {k: t for k, t in own.items() if k in _KEYS}
        missing = {"W", "D"} - own.keys()
        if missing:
            raise ValueError(f"{path}: {key} has no {' and no '.join(sorted(missing))} beside it")
        options = header.get(name) or _options_from_shapes(own)
        options |= {option: value for option, value in given.items() if value is not None}
        layer = DLR(**options).to(own["W"].dtype)
        layer.load_state_dict(own)
        layers[name] = layer.eval()
    if not layers:
        raise ValueError(f"{path} holds no DLR layer: no key ends in log_lambda_re")
    return layers


_KEYS = ("log_lambda_re", "log_lambda_im", "W", "D", "out.weight", "out.bias")


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file")
    if path.suffix != ".safetensors":
        raise ValueError(
            f"{path}: only .safetensors files are read (nothing is unpickled); write one with"
            " safetensors.torch.save_file(model.state_dict(), path)"
        )
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            metadata = file.metadata() or {}
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file: {error}") from error
    return tensors, json.loads(metadata.get(HEADER, "{}"))


def _options_from_shapes(own: dict[str, Tensor]) -> dict[str, Any]:
    rows, d_state, parts = own["W"].shape
    (d_model,) = own["D"].shape
    weight = own.get("out.weight", torch.empty(0, 0))
    return {
        "d_model": d_model,
        "d_state": d_state,
        "bidirectional": rows == 2 * d_model,
        "real": parts == 1,
        "glu": weight.shape[0] == 2 * d_model,
        "project": "out.weight" in own,
    }
