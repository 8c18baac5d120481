"""Layers in files: safetensors, with the options of every DLR layer in the header."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dlrnn.common.files import write_whole
from dlrnn.common.untrusted import fit, parse_json, read_sealed, seal
from dlrnn.nn.dlr import DLR
from dlrnn.ops.checks import require

HEADER = "dlrnn"
_KEYS = ("log_lambda_re", "log_lambda_im", "W", "D", "out.weight", "out.bias")


def save_model(model: nn.Module, path: str | Path) -> None:
    """Writes the parameters of any model; after a crash the file is complete or absent.

    Tensors that are shared (tied weights) are written under each of their names.
    """
    path = Path(path)
    require(path.suffix == ".safetensors", f"{path}: the name must end in .safetensors")
    require(path.parent.is_dir(), f"{path}: there is no folder {path.parent}")
    write_whole(path, model_bytes(model))


def model_bytes(model: nn.Module, metadata: Mapping[str, str] | None = None) -> bytes:
    """The bytes that `save_model` writes: with a SHA-256 of the whole file and this metadata."""
    kind = type(model).__name__
    require(isinstance(model, nn.Module), f"save_model takes a model, not a {kind}")
    modules = model.named_modules(remove_duplicate=False)  # a shared layer has two names
    options = {name: module.options() for name, module in modules if isinstance(module, DLR)}
    tensors = {}
    for name, value in model.state_dict().items():
        kind = type(value).__name__
        require(isinstance(value, Tensor), f"only tensors can be saved, and {name} is a {kind}")
        require(not value.is_meta, f"{name} has no values to save: it is on the meta device")
        gathered = f"{name} is a {kind}, a part of it: gather it first (`full_tensor()`)"
        require(not hasattr(value, "full_tensor"), gathered)
        tensors[name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
    return seal(tensors, {**(metadata or {}), HEADER: json.dumps(options)})


def outline(make: Callable[[], nn.Module]) -> dict[str, Tensor]:
    """The names and shapes of a model's tensors. It is made on the meta device, without memory."""
    with torch.device("meta"):
        return make().state_dict()


def misfit(own: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> str:
    """The first name or shape that differs between a model's outline and tensors; "" if none does.

    Compare before a model is made: its configuration may state sizes that its file does not have.
    """
    for name in sorted(own.keys() | tensors.keys()):
        expected, given = (list(t[name].shape) if name in t else None for t in (own, tensors))
        if expected != given:
            return f"{name} is {given or 'not there'}, not {expected or 'there'}"
    return ""


def load_layers(
    path: str | Path, *, cast: str | None = None, kernel_length: int | None = None
) -> dict[str, DLR]:
    """Every DLR layer in a safetensors file, by its name in the model ("" for a lone layer).

    Options that the header lacks are derived from the shapes. The shapes do not show `cast` and
    `kernel_length`, which can be given.
    """
    tensors, header = _read(Path(path))
    given = {"cast": cast, "kernel_length": kernel_length}
    given = {option: value for option, value in given.items() if value is not None}
    layers = {}
    for key in tensors:
        name, _, last = key.rpartition(".")
        prefix = f"{name}." if name else ""
        own = {k: tensors[prefix + k] for k in _KEYS if prefix + k in tensors}
        if last != "log_lambda_re" or not {"W", "D"} <= own.keys():
            continue  # not a DLR layer
        try:
            layers[name] = _layer(own, header.get(name), given)
        except (TypeError, RuntimeError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"{path}: the layer {name!r} cannot be made: {reason}") from error
    require(bool(layers), f"{path} holds no DLR layer (NAME.log_lambda_re, NAME.W, NAME.D)")
    missing = ", ".join(repr(name) for name in header if name not in layers)
    require(not missing, f"{path}: the header names {missing}, and the tensors are not there")
    return layers


def _layer(own: dict[str, Tensor], options: dict[str, Any] | None, given: dict[str, Any]) -> DLR:
    for option, value in given.items():
        said = options.get(option, value) if options else value
        require(said == value, f"{option}={value!r} was given, and the file says {said!r}")
    make = partial(DLR, **(options or _options_from_shapes(own) | given))
    wrong = misfit(outline(make), own)
    require(not wrong, f"its tensors do not fit its options: {wrong}")
    for key, value in own.items():
        require(value.is_floating_point(), f"{key} must be floating point, not {value.dtype}")
    layer = make().to(own["W"].dtype)
    layer.load_state_dict(own)
    return layer.eval()


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file")
    if path.suffix != ".safetensors":
        raise ValueError(
            f"{path}: only .safetensors files are read (nothing is unpickled); write one with"
            " safetensors.torch.save_file(model.state_dict(), path)"
        )
    found = read_sealed(path, links=True)
    told = found.metadata.get(HEADER)
    if told is None:
        return found.tensors, {}
    require(found.sealed, f"{path} has no SHA-256, so it may be damaged: save the model again")
    where = f"the header {HEADER!r} of {path}"
    return found.tensors, fit(parse_json(told.encode(), where), dict[str, dict[str, Any]], where)


def _options_from_shapes(own: dict[str, Tensor]) -> dict[str, Any]:
    shape = list(own["W"].shape)
    require(len(shape) == 3 and shape[2] in (1, 2), f"W must be [H, N, 2], not {shape}")
    rows, d_state, parts = shape
    d_model = own["D"].numel()
    require(rows in (d_model, 2 * d_model), f"W has {rows} rows for the {d_model} entries of D")
    weight = own.get("out.weight", torch.empty(0, 0))
    return {
        "d_model": d_model,
        "d_state": d_state,
        "bidirectional": rows == 2 * d_model,
        "real": parts == 1,
        "glu": weight.shape[:1] == (2 * d_model,),
        "project": "out.weight" in own,
    }
