"""Snapshots of layers during training as JSON: eigenvalues, kernels, impulse response.

A run writes them to `snapshots.jsonl`, which the explorer of `dlrnn report` shows.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from dlrnn.nn import DLR, DSS, S4D
from dlrnn.ops.checks import require

SNAPSHOTS = "snapshots.jsonl"
EIGENVALUES, KERNELS, SAMPLES = 256, 4, 512  # at most, of a layer


def snapshot(model: nn.Module, step: int, length: int) -> dict[str, Any]:
    """Every DLR, DSS and S4D layer of a model, in numbers of four digits.

    Eigenvalues are pairs (log |lambda|, phase); of more than 256, evenly spaced ones are chosen.
    There are kernels of up to four channels. `response` is the root mean square over all channels
    of the answer to a unit impulse, with the skip D. In a kernel longer than 512, each number
    stands for `stride` samples: it is the one of largest magnitude, so that no peak is lost.
    """
    require(length >= 1, f"a kernel needs a length of at least 1, not {length}")
    layers = [
        {"name": name, "kind": type(layer).__name__, **_numbers(layer, length)}
        for name, layer in model.named_modules()
        if isinstance(layer, DLR | DSS | S4D)
    ]
    return {"step": step, "length": length, "layers": layers}


@torch.no_grad()
def _numbers(layer: DLR | DSS | S4D, length: int) -> dict[str, Any]:
    modes = layer.modes()
    log_lambda = modes.log_lambda.flatten(0, -2).cpu()  # [N, 2]; [H N, 2] of DSS and S4D
    kernel = layer.kernel(length).double().cpu()  # [rows, K]
    stride = -(-kernel.shape[1] // SAMPLES)
    eigenvalues = log_lambda[_evenly(len(log_lambda), EIGENVALUES)]
    eigenvalues[:, 1] = torch.remainder(eigenvalues[:, 1] + math.pi, 2 * math.pi) - math.pi
    response = kernel.clone()
    response[: layer.d_model, 0] += layer.D.double().cpu()
    power = response.square().sum(0) / layer.d_model  # [K]; both directions add up
    return {
        "channels": layer.d_model,
        "states": layer.d_state,
        "bidirectional": layer.bidirectional,
        "eigenvalues_of": len(log_lambda),
        "eigenvalues": [_rounded(pair) for pair in eigenvalues],
        "kernel_length": kernel.shape[1],
        "stride": stride,
        "kernels": [
            {"channel": channel, "values": _rounded(_peaks(kernel[channel], stride))}
            for channel in _evenly(layer.d_model, KERNELS)
        ],
        "response": _rounded(_peaks(power.sqrt(), stride)),
    }


def _evenly(count: int, most: int) -> list[int]:
    """Up to `most` evenly spaced numbers of 0 .. count - 1, with the first and the last."""
    if count <= most:
        return list(range(count))
    return [round(k * (count - 1) / (most - 1)) for k in range(most)]


def _peaks(values: Tensor, stride: int) -> Tensor:
    """The number of largest magnitude of every `stride` numbers."""
    missing = -len(values) % stride
    parts = torch.cat((values, values.new_zeros(missing))).view(-1, stride)
    return parts.gather(1, parts.abs().argmax(1, keepdim=True))[:, 0]


def _rounded(values: Tensor) -> list[float]:
    return [float(f"{value:.4g}") for value in values.tolist()]
