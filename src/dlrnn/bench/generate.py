"""`dlrnn bench generate`: the time of a token after a prompt, with DLR and with attention."""

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dlrnn.bench.measure import (
    announced,
    machine,
    median_ms,
    relative_error,
    require_right,
    timed,
)
from dlrnn.models import LanguageConfig, LanguageModel
from dlrnn.models.language import LanguageMixer
from dlrnn.models.model import State
from dlrnn.nn import CapturedSteps

TOLERANCE = 1e-4
WINDOWS = 5  # parts of the text, one row each
GRAPH_STEPS = 110
MIXERS: tuple[LanguageMixer, ...] = ("dlr", "attention")


@torch.inference_mode()
def bench_generate(
    *, prompt: int, tokens: int, layers: int, experts: int, batch: int, device: str, factor: int = 1
) -> dict[str, Any]:
    """Milliseconds a token in each part of a text, and megabytes of state at its end.

    The models have Table 5's sizes and the causal router, are not trained and run in fp32. They
    read every token in turn, so that a noisy moment hits both. The lower quartile of the times is
    shown. `factor` divides the numbers of tokens.
    """
    where = torch.device(device)
    prompt, tokens = max(1, prompt // factor), max(1, tokens // factor)
    text = _text(batch, prompt + tokens, where)
    models = {mixer: _model(mixer, layers, experts, where) for mixer in MIXERS}
    prefill, states = {}, {}
    for mixer, model in models.items():
        _read(model, text[:, :prompt])  # compiles kernels
        spent, states[mixer] = timed(partial(_read, model, text[:, :prompt]), where)
        prefill[f"{mixer}_ms"] = round(1e3 * spent, 3)
    parts = min(WINDOWS, tokens)
    rows = []
    for part in announced(range(parts), lambda part: f"part {part + 1} of the text"):
        first, end = (prompt + (part + k) * tokens // parts for k in (0, 1))
        times: dict[str, list[float]] = {name: [] for name in models}
        for token in text[:, first:end].unbind(1):
            for name, model in models.items():
                spent, (_, states[name]) = timed(partial(model.step, token, states[name]), where)
                times[name].append(spent)
        row: dict[str, Any] = {"position": end}
        for mixer in MIXERS:
            row[f"{mixer}_ms"] = round(1e3 * lower_quartile(times[mixer]), 3)
            if where.type == "cuda":
                row[f"{mixer}_graph_ms"] = _captured_ms(models[mixer], states[mixer], text[:, 0])
            row[f"{mixer}_MB"] = round(_megabytes(states[mixer]), 1)
        rows.append(row)
    growth = {name: rows[-1][f"{name}_ms"] / rows[0][f"{name}_ms"] for name in MIXERS}
    return {
        "case": {"B": batch, "layers": layers, "experts": experts, "prompt": prompt},
        **machine(where),
        "prompt": prefill,
        "tokens": rows,
        "last_over_first": {name: round(value, 3) for name, value in growth.items()},
    }


def _captured_ms(model: LanguageModel, state: State, token: Tensor) -> float:
    """Milliseconds of a token whose step is the replay of a CUDA graph: the median of ten."""
    step = CapturedSteps(model, state, GRAPH_STEPS)
    times = [timed(partial(_repeat, partial(step, token)), token.device)[0] for _ in range(11)]
    return round(median_ms(times[1:]) / (GRAPH_STEPS // 11), 3)


def _repeat(step: Callable[[], Tensor]) -> None:
    for _ in range(GRAPH_STEPS // 11):
        step()


def _text(batch: int, tokens: int, device: torch.device) -> Tensor:
    torch.manual_seed(0)
    return torch.randint(LanguageConfig().vocabulary, (batch, tokens), device=device)


def _read(model: LanguageModel, text: Tensor) -> State:
    """The state after a text."""
    _, state = model.codes(text, return_state=True)
    return state


def _model(mixer: LanguageMixer, layers: int, experts: int, device: torch.device) -> LanguageModel:
    """A model whose steps agree with the whole sequence."""
    config = LanguageConfig(mixer, experts, layers=layers, router="threshold")
    model = LanguageModel(config).to(device).eval()
    text = _text(1, 24, device)
    state, steps = _read(model, text[:, :16]), []
    for token in text[:, 16:].unbind(1):
        logits, state = model.step(token, state)
        steps.append(logits)
    error = relative_error(torch.stack(steps, dim=1), model(text)[:, 16:].double())
    require_right({f"steps of {mixer} against the whole": error}, TOLERANCE)
    return model


def lower_quartile(times: list[float]) -> float:
    """The lower quartile, between the least and the largest of the times.

    The default method of `statistics` goes below both of two times, even below 0.
    """
    return statistics.quantiles(times, n=4, method="inclusive")[0] if len(times) > 1 else times[0]


def _megabytes(state: State) -> float:
    tensors = [leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors) / 1e6
