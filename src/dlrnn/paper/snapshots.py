"""Snapshots of trained layers, packed into a fifth of the JSON of `analysis.snapshot`.

Numbers become 16-bit integers, little-endian, in base64, and explorer.js unpacks them:

eigenvalues   pairs: log10(-log |lambda|) in steps of 1/2000, NONE for |lambda| >= 1; phase / pi
kernels       shares of `high`, the largest magnitude
response      log10 in steps of 1/2000, NONE for 0
"""

import base64
from typing import Any

import numpy as np
from numpy.typing import NDArray

SAMPLES = 256  # of a kernel, at most
STEP, NONE, MOST = 2000, -32768, 32767

Floats = NDArray[np.float64]


def check_snapshot(values: Any) -> dict[str, Any]:
    """A checked and packed snapshot, from packed JSON or that of `analysis.snapshot`."""
    layers = [_layer(each) for each in values["layers"]]
    return {"step": int(values["step"]), "length": int(values["length"]), "layers": layers}


def _layer(layer: Any) -> dict[str, Any]:
    whole = ("channels", "states", "eigenvalues_of", "kernel_length", "stride")
    known: dict[str, Any] = {
        "name": str(layer["name"]),
        "kind": str(layer["kind"]),
        "bidirectional": bool(layer["bidirectional"]),
        **{name: int(layer[name]) for name in whole},
    }
    if isinstance(layer["eigenvalues"], str):
        return {
            **known,
            "eigenvalues": _words(layer["eigenvalues"], 2),
            "kernels": [_packed_kernel(one) for one in layer["kernels"]],
            "response": _words(layer["response"]),
        }
    fewer = -(-len(layer["response"]) // SAMPLES) or 1
    known["stride"] *= fewer
    pairs = _finite(layer["eigenvalues"]).reshape(-1, 2)
    packed = np.stack((_logarithms(-pairs[:, 0]), pairs[:, 1] / np.pi * MOST), axis=-1)
    return {
        **known,
        "eigenvalues": _text(packed),
        "kernels": [_kernel(one, fewer) for one in layer["kernels"]],
        "response": _text(_logarithms(_peaks(_finite(layer["response"]), fewer))),
    }


def _packed_kernel(one: Any) -> dict[str, Any]:
    if not 0 < one["high"] < 1e300:
        raise ValueError("the largest magnitude is a positive number")
    values = _words(one["values"])
    return {"channel": int(one["channel"]), "high": float(one["high"]), "values": values}


def _kernel(one: Any, fewer: int) -> dict[str, Any]:
    values = _peaks(_finite(one["values"]), fewer)
    high = float(f"{np.abs(values).max(initial=1e-30):.4g}")
    return {"channel": int(one["channel"]), "high": high, "values": _text(values / high * MOST)}


def _finite(values: Any) -> Floats:
    found = np.asarray(values, dtype=np.float64)
    return np.where(np.isfinite(found), found, 0.0)


def _peaks(values: Floats, fewer: int) -> Floats:
    """The number of largest magnitude among every `fewer` of them."""
    parts = np.append(values, np.zeros(-len(values) % fewer)).reshape(-1, fewer)
    return np.take_along_axis(parts, np.abs(parts).argmax(1)[:, None], 1)[:, 0]


def _logarithms(values: Floats) -> Floats:
    """Scaled logarithms; NONE for numbers that are not positive."""
    logs = np.log10(np.where(values > 0, values, 1.0)).clip(-16, 16)
    return np.where(values > 0, logs * STEP, NONE)


def _text(values: Floats) -> str:
    words = np.rint(values).clip(NONE, MOST).astype("<i2")
    return base64.b64encode(words.tobytes()).decode()


def _words(text: str, each: int = 1) -> str:
    """Check that text is base64 of 16-bit integers, a multiple of `each` of them."""
    if len(base64.b64decode(text, validate=True)) % (2 * each):
        raise ValueError("packed numbers have 16 bits each")
    return text
