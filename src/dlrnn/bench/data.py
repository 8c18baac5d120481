"""`dlrnn bench data`: the time to make a batch, and that of the training step that uses it."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW

from dlrnn import tasks
from dlrnn.bench.measure import announced, machine, median_ms, replayed, seconds
from dlrnn.nn import DLR
from dlrnn.tasks import listops, pathfinder
from dlrnn.tasks.atomic import ATOMIC
from dlrnn.train.step import batch_maker


def bench_data(
    *, d_model: int, d_state: int, length: int, device: str, repeats: int
) -> dict[str, Any]:
    """Median ms of a batch and of a training step (forward, backward, AdamW) that uses it.

    The model is one DLR layer between two linear maps: no model of the paper has a cheaper step.
    Batches are of 16 (MIPS: 4), as in the paper. On a GPU both are replays of CUDA graphs, with
    the sampler compiled as in the training loop.
    """
    where = torch.device(device)
    rows = []
    for kind in announced(ATOMIC, lambda each: each.name):
        task, size = kind(length=length), 4 if kind.name == "mips" else 16
        model = nn.Sequential(
            nn.Linear(task.d_input, d_model),
            DLR(d_model, d_state),
            nn.Linear(d_model, task.d_output),
        ).to(where)
        batch, index = task.sample(size, device=where), torch.zeros((), dtype=torch.int64).to(where)
        on_gpu = where.type == "cuda"
        optimizer = AdamW(model.parameters(), fused=True, capturable=on_gpu)
        torch.compiler.reset()
        functions: dict[str, Callable[[], object]] = {
            "sample": partial(batch_maker(task, size, where), index),
            "step": partial(_step, model, optimizer, task, batch),
        }
        if on_gpu:
            times = {name: replayed(function, repeats) for name, function in functions.items()}
        else:
            times = seconds(functions, where, repeats)
        sample, step = median_ms(times["sample"]), median_ms(times["step"])
        row = {"task": task.name, "sample_ms": round(sample, 3), "step_ms": round(step, 3)}
        rows.append({**row, "fraction": round(sample / step, 4)})
    segmented = "pathfinder-segmentation"
    sets: list[tuple[listops.ListOpsGenerator | pathfinder.PathfinderGenerator, str, int]] = [
        (listops.subtrees(), "listops-subtrees", 500),
        (listops.lra(), "listops", 5000),
        *((pathfinder.segmentation(n), f"{segmented} {n}", 64) for n in (128, 256, 512)),
        (pathfinder.lra(), "pathfinder", 1000),
        (pathfinder.path_x(), "path-x", 64),
    ]
    return {
        "case": {"H": d_model, "N": d_state, "L": length},
        **machine(where),
        "tasks": rows,
        "generators": [_generator(*each) for each in announced(sets, lambda each: each[1])],
    }


def _generator(
    spec: listops.ListOpsGenerator | pathfinder.PathfinderGenerator, name: str, samples: int
) -> dict[str, Any]:
    """Samples a second on one core, after compilation."""
    spec.draw("train", 0)
    start = time.perf_counter()
    for index in range(samples):
        spec.draw("train", index)
    rate = samples / (time.perf_counter() - start)
    return {"set": name, "samples_a_second": round(rate, 1)}


def _step(
    model: nn.Module, optimizer: AdamW, task: tasks.RegressionTask, batch: tasks.Batch
) -> None:
    optimizer.zero_grad(set_to_none=True)
    task.loss(model(batch.inputs), batch).backward()
    optimizer.step()
