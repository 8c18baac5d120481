"""`dlrnn bench generate`: the time of a token after a prompt, with DLR and with attention."""

import statistics
import time
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dlrnn.bench.measure import announced, machine, relative_error, require_right, synchronize
from dlrnn.models import LanguageConfig, LanguageModel
from dlrnn.models.language import LanguageMixer
from dlrnn.models.model import State

TOLERANCE = 1e-4
WINDOWS = 5  # parts of the text, one row each
MIXERS: tuple[LanguageMixer, ...] = ("dlr", "attention")


def bench_generate(
    *, prompt: int, tokens: int, layers: int, experts: int, batch: int, device: str
) -> dict[str, Any]:
    """Milliseconds a token in each part of a text, and megabytes of state at its end.

    The models have Table 5's sizes and the causal router, are not trained and run in fp32. They
    read every token in turn, so that a noisy moment hits both. The lower quartile of the times is
    shown.
    """
    where = torch.device(device)
    texts = _Texts(prompt, tokens, batch, where)
    models = {mixer: _model(mixer, layers, experts, where) for mixer in MIXERS}
    states = {mixer: texts.read_prompt(model) for mixer, model in models.items()}
    parts = min(WINDOWS, tokens)
    rows = []
    for part in announced(range(parts), lambda part: f"part {part + 1} of the text"):
        window = range(part * tokens // parts, (part + 1) * tokens // parts)
        row: dict[str, Any] = {"position": prompt + window.stop}
        times = texts.read_steps(models, states, window)
        for mixer in MIXERS:
            row[f"{mixer}_ms"] = round(1e3 * lower_quartile(times[mixer]), 3)
            row[f"{mixer}_MB"] = round(_megabytes(states[mixer]), 1)
        rows.append(row)
    growth = {name: rows[-1][f"{name}_ms"] / rows[0][f"{name}_ms"] for name in MIXERS}
    return {
        "case": {"B": batch, "layers": layers, "experts": experts, "prompt": prompt},
        **machine(where),
        "tokens": rows,
        "last_over_first": {name: round(value, 3) for name, value in growth.items()},
    }


class _Texts:
    """Random tokens, which models read whole and one by one."""

    def __init__(self, prompt: int, tokens: int, batch: int, where: torch.device) -> None:
        torch.manual_seed(0)
        vocabulary = LanguageConfig().vocabulary
        self.text = torch.randint(vocabulary, (batch, prompt + tokens), device=where)
        self.prompt, self.where = prompt, where

    @torch.inference_mode()
    def read_prompt(self, model: LanguageModel) -> State:
        """The state after the prompt."""
        answer = model.codes(self.text[:, : self.prompt], return_state=True)
        return cast("tuple[Tensor, State]", answer)[1]

    @torch.inference_mode()
    def read_steps(
        self, models: dict[LanguageMixer, LanguageModel], states: dict[Any, State], window: range
    ) -> dict[str, list[float]]:
        """Seconds of each token of a window; the states advance."""
        times: dict[str, list[float]] = {name: [] for name in models}
        for k in window:
            for name, model in models.items():
                synchronize(self.where)
                start = time.perf_counter()
                _, states[name] = model.step(self.text[:, self.prompt + k], states[name])
                synchronize(self.where)
                times[name].append(time.perf_counter() - start)
        return times


def _model(mixer: LanguageMixer, layers: int, experts: int, where: torch.device) -> LanguageModel:
    """A model whose steps agree with the whole sequence."""
    config = LanguageConfig(mixer, experts, layers=layers, router="threshold")
    model = LanguageModel(config).to(where).eval()
    short = _Texts(16, 8, 1, where)
    with torch.inference_mode():
        whole, state, steps = model(short.text), short.read_prompt(model), []
        for k in range(16, 24):
            logits, state = model.step(short.text[:, k], state)
            steps.append(logits)
    error = relative_error(torch.stack(steps, dim=1), whole[:, 16:].double())
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
