"""`dlrnn bench step --tables`: the training step of each model of Tables 1, 3, 5 and 6."""

import json
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch.optim import AdamW

from dlrnn.bench.measure import announced, machine, median_ms, timed
from dlrnn.models import LanguageConfig
from dlrnn.nn import param_groups
from dlrnn.paper import recipes
from dlrnn.paper.numbers import row_of, table
from dlrnn.paper.recipes import Scale, table3, table5
from dlrnn.tasks import Batch
from dlrnn.train import RunConfig, make_model, train
from dlrnn.train.step import TrainingStep, forward, make_step

GROUPS = (
    ("dlr-1", "dss-1", "attention-1", "dlr-6", "attention-ff-1"),  # L 4096
    ("dlr-6-512", "attention-2-512", "attention-ff-2-512"),
)
"""Columns that share a length; the first of each is the unit."""

HIGHER_ORDER = ("listops-subtrees", "pathfinder-segmentation-128")
UNIT, MOST_REPEATS = "attention-16", 3
"""The language model whose throughput is the unit; a step of the full size takes a second."""
MODELS = {"dlr": "DLR", "dss": "DSS-exp", "local-attention": "LocalAttention"}


def bench_tables(*, device: str, scale: Scale, repeats: int) -> dict[str, Any]:
    """Median ms of a whole training step (forward, backward, AdamW; the data too, where the device
    makes it), and what that is relative to DLR's.
    """
    where = torch.device(device)
    return {
        "case": {"scale": scale},
        **machine(where),
        "models": _atomic(where, scale, repeats),
        "table3": _higher_order(where, scale, repeats),
        "table5": _language(where, scale, repeats),
        "loop": loop_overhead() if where.type == "cpu" else None,  # a graph's bare step is another
    }


def _precisions(where: torch.device) -> tuple[Literal["fp32", "bf16"], ...]:
    """On a GPU also bf16 under autocast."""
    return ("fp32", "bf16") if where.type == "cuda" else ("fp32",)


def _atomic(where: torch.device, scale: Scale, repeats: int) -> list[dict[str, Any]]:
    """On Shift (length L) and on Reverse (2 L), relative to the first column of its length."""
    rows = []
    for group in GROUPS:
        units: dict[str, float] = {}
        for column, precision in [(c, p) for c in group for p in _precisions(where)]:
            row: dict[str, Any] = {"model": column, "precision": precision}
            for task, length in (("shift", "L"), ("reverse", "2L")):
                table_name = "table6" if "ff" in column else "table1"
                config = recipes.scaled(recipes.get(f"{table_name}/{task}/{column}"), scale)
                ms = step_ms(replace(config, precision=precision), where, repeats)
                units.setdefault(length, ms)
                row |= {f"{length} ms": round(ms, 3), f"{length}": round(ms / units[length], 2)}
                row[f"{length} paper"] = _published(column, length)
            rows.append(row)
    return rows


def _higher_order(where: torch.device, scale: Scale, repeats: int) -> list[dict[str, Any]]:
    rows, units = [], dict[str, float]()
    cases = list(product(HIGHER_ORDER, MODELS, _precisions(where)))
    for name, model, precision in announced(cases, "table3/{0[0]}/{0[1]}, {0[2]}".format):
        config = recipes.scaled(recipes.get(f"table3/{name}/{model}"), scale)
        settings = {k: v for k, v in config.task.settings.items() if k != "folder"}
        config = replace(config, task=replace(config.task, settings=settings))  # drawn on the spot
        ms = step_ms(replace(config, precision=precision), where, repeats)
        units.setdefault(name, ms)
        title = table3.TASKS[name]
        paper = row_of("table3_higher_order", MODELS[model])[title]["relative_time"]
        row = {"task": title, "model": MODELS[model], "precision": precision, "ms": round(ms, 3)}
        rows.append(row | {"relative": round(ms / units[name], 2), "paper": float(paper)})
    return rows


def _language(where: torch.device, scale: Scale, repeats: int) -> list[dict[str, Any]]:
    """Tokens a second on random tokens, relative to the Transformer's with 16 experts.

    The paper's models are too large for a CPU.
    """
    if where.type == "cpu" and scale != "tiny":
        return []
    rows: list[dict[str, Any]] = []
    for paper in announced(table("table5_language_model")["rows"], "table5/{0[model]}".format):
        model = f"{table5.MODELS[paper['model']]}-{paper['experts']}"
        config = recipes.scaled(recipes.get(f"table5/pg19/{model}-pre"), scale)
        precision: Literal["fp32", "bf16"] = "bf16" if where.type == "cuda" else "fp32"
        ms = step_ms(replace(config, precision=precision), where, min(repeats, MOST_REPEATS))
        row = {"model": model, "precision": precision, "ms": round(ms, 3)}
        rows.append(row | {"paper": float(paper["throughput"])})
    unit = next(row["ms"] for row in rows if row["model"] == UNIT)
    return [row | {"relative": round(unit / row["ms"], 2)} for row in rows]


def _host_batches(step: TrainingStep, k: int) -> list[Batch]:
    """The micro-batches of a step; random tokens for a language model, which needs no data set."""
    if not isinstance(step.config.model, LanguageConfig):
        return step.samples(k)
    count, length = step.config.accumulate, step.task.input_length
    size = (step.config.batch_size // count, length + 1)
    tokens = torch.randint(step.config.model.vocabulary, (count, *size), device=step.device)
    return [Batch(each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in tokens]


def step_ms(config: RunConfig, device: torch.device, repeats: int) -> float:
    """The median milliseconds of an update as the training loop makes it, of `repeats`.

    On a GPU several updates are timed together, because the loop does not wait for each. Batches
    that the host makes are made before and used again, because the loop prefetches them.
    """
    step = make_step(config, device)
    many = 20 if step.task.on_device else 5
    together, warm = (many, 1) if device.type == "cuda" else (1, 6)
    parts = [None if step.task.on_device else _host_batches(step, k) for k in range(together)]

    def steps(first: int) -> None:
        for k, part in enumerate(parts):
            step(first + k, part)

    firsts = range(0, (repeats + warm) * together, together)
    times = [timed(partial(steps, first), device)[0] / together for first in firsts]
    return median_ms(times[warm:])


def loop_overhead(steps: int = 600) -> dict[str, float]:
    """The time of the training loop with records and checks over that of bare PyTorch: tiny Shift.

    A bare step runs before each step of the loop, so that a noisy moment hits both.
    """
    recipe = recipes.get("table1/shift/dlr-1")
    config = replace(
        recipes.scaled(recipe, "tiny"), steps=steps, eval_every=steps, checkpoint_every=steps
    )
    bare_step, spent = _bare_step(config), list[float]()
    call = TrainingStep.__call__

    def both(self: TrainingStep, step: int, batches: Any) -> None:
        spent.append(timed(partial(bare_step, step), self.device)[0])
        call(self, step, batches)

    with tempfile.TemporaryDirectory() as folder, patch.object(TrainingStep, "__call__", both):
        train(Path(folder) / "run", config, device="cpu", show=False, writer="none")
        lines = (Path(folder) / "run" / "timing.jsonl").read_text().splitlines()
    first, last = json.loads(lines[0]), json.loads(lines[-1])
    spent = spent[first["step"] :]
    looped = (last["seconds"] - first["seconds"] - sum(spent)) / len(spent)
    bare = statistics.mean(spent)
    ms = {"loop_ms": round(1e3 * looped, 3), "bare_ms": round(1e3 * bare, 3)}
    return {**ms, "overhead": round(looped / bare - 1, 3)}


def _bare_step(config: RunConfig) -> Callable[[int], None]:
    """A training step in plain PyTorch."""
    task = config.make_task()
    model = make_model(config, task)
    optimizer = AdamW(param_groups(model, lr=config.lr), fused=True)

    def step(k: int) -> None:
        batch = task.sample(config.batch_size, step=k)
        optimizer.zero_grad(set_to_none=True)
        task.loss(forward(model, batch), batch).backward()
        optimizer.step()

    return step


def _published(column: str, length: str) -> float | None:
    """The paper's relative time of that column."""
    kind, layers = column.removesuffix("-512").rsplit("-", 1)
    name = "table6_param_tied" if kind == "attention-ff" else "table1_atomic"
    names = {"dlr": "DLR", "dss": "DSS-exp", "attention": "Attention"}
    wanted = (names.get(kind, "Attention+2FF"), int(layers), column.endswith("-512"))
    for entry in table(name)["columns"]:
        if (entry["model"], entry["layers"], entry["L"] == 512) == wanted:
            times = list(entry["relative_time"].values())
            return float(times[0 if length == "L" else 1])
    return None
