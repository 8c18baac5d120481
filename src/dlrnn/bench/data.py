"""`dlrnn bench data`: the time to make a batch, and that of the training step that uses it."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW

from dlrnn import tasks
from dlrnn.bench.measure import announced, device_ms, machine
from dlrnn.nn import DLR
from dlrnn.tasks import listops, pathfinder
from dlrnn.tasks.atomic import ATOMIC
from dlrnn.train.step import batch_maker

Generator = listops.ListOpsGenerator | pathfinder.PathfinderGenerator


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
        optimizer = AdamW(model.parameters(), fused=True, capturable=where.type == "cuda")
        torch.compiler.reset()
        functions: dict[str, Callable[[], object]] = {
            "sample": partial(batch_maker(task, size, where), index),
            "step": partial(_step, model, optimizer, task, batch),
        }
        ms = device_ms(functions, where, repeats)
        row = {"task": task.name, **{f"{name}_ms": round(value, 3) for name, value in ms.items()}}
        rows.append({**row, "fraction": round(ms["sample"] / ms["step"], 4)})
    segmented = "pathfinder-segmentation"
    sets: list[tuple[Generator, str, int]] = [
        (listops.subtrees(), "listops-subtrees", 500),
        (listops.lra(), "listops", 5000),
        *((pathfinder.segmentation(n), f"{segmented} {n}", 200) for n in (128, 256, 512)),
        (pathfinder.lra(), "pathfinder", 1000),
        (pathfinder.path_x(), "path-x", 200),
    ]
    return {
        "case": {"H": d_model, "N": d_state, "L": length},
        **machine(where),
        "tasks": rows,
        "generators": [_generator(*each) for each in announced(sets, lambda each: each[1])],
    }


def _generator(spec: Generator, name: str, samples: int) -> dict[str, Any]:
    """Samples a second of CPU time on one core, after compilation."""
    spec.draw("train", 0)
    began = time.process_time()
    for index in range(samples):
        spec.draw("train", index)
    spent = time.process_time() - began
    return {"set": name, "samples_a_second": round(samples / spent, 1)}


def _step(
    model: nn.Module, optimizer: AdamW, task: tasks.RegressionTask, batch: tasks.Batch
) -> None:
    optimizer.zero_grad(set_to_none=True)
    task.loss(model(batch.inputs), batch).backward()
    optimizer.step()
