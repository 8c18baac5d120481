"""Results that nobody measured, to look at pages: `python tests/made_up.py DIR`."""

import io
import json
import math
import random
import sys
from dataclasses import replace
from pathlib import Path

import torch
from matplotlib.figure import Figure
from support import DEVICE

from dlrnn.analysis.snapshot import snapshot
from dlrnn.cli import main
from dlrnn.models import ModelConfig, build_model
from dlrnn.paper import recipes
from dlrnn.paper.records import Record
from dlrnn.paper.results import Collected
from dlrnn.paper.snapshots import check_snapshot
from dlrnn.paper.store import add

SHIFT = "table1/shift/dlr-1"
STEPS = (0, 1000, 5000, 20000, 40000)
SILENT = ("--writer", "none", "--device", DEVICE.type)


def train(out, *arguments, recipe=SHIFT, steps=4):
    """A real run of a few steps at the tiny scale."""
    few = ["--steps", str(steps), "--batch_size", "2", "--log_every", "1"]
    few += ["--eval_every", "2", "--eval_batches", "1"]
    where = ["--scale", "tiny", "--out", str(out), *SILENT]
    assert main(["train", recipe, *few, *where, *arguments]) == 0
    return out


def record(recipe=SHIFT, **changed):
    split = "validation" if changed.get("metric", "R2") == "R2" else "test"
    asked = recipes.RECIPES[recipe].config.steps if recipe in recipes.RECIPES else 1000
    made = Record(
        recipe=recipe,
        variant="",
        seed=0,
        metric="R2",
        value=0.99,
        split=split,
        steps=asked,
        steps_asked=asked,
        commit="0123456789abcdef0123456789abcdef01234567",
        hardware="made-up GPU",
        versions={"dlrnn": "0.0", "torch": "0.0"},
        seconds_per_step=0.0008,
        wall_seconds=37.2,
        parameters=1_100_000,
        command=f"dlrnn train {recipe} --seed 0",
    )
    return replace(made, **changed)


def run(recipe, seed=0, *, variant="", points=60, **files):
    """A run whose numbers are near the paper's, some far from them."""
    draw = random.Random(f"{recipe} {seed}")
    known = recipes.RECIPES[recipe]
    asked = known.config.steps
    steps = asked if draw.random() < 0.8 else asked // 8
    places = [(steps * k // points, k / points) for k in range(1, points + 1)]
    shared = {"seed": seed, "steps": steps, "variant": variant}
    records, curve = [], {"train loss": [], "validation loss": []}
    for metric, paper in known.paper.items():
        unit = 1 if metric in ("R2", "loss", "train_loss") else 100
        off = draw.gauss(0, 0.012) - (0.2 * draw.random() if draw.random() < 0.15 else 0)
        value = round(min(float(unit), max(0.0, paper + unit * off)), 4)
        records.append(record(recipe, metric=metric, value=value, **shared))
        speed = draw.uniform(2, 12)
        if "loss" not in metric:
            curve[f"validation {metric}"] = [
                (step, value * (1 - math.exp(-speed * share)) + unit * draw.gauss(0, 0.004))
                for step, share in places
            ]
    for name in ("train loss", "validation loss"):
        curve[name] = [
            (step, 0.3 * math.exp(-5 * share) + 0.01 * draw.random()) for step, share in places
        ]
    return Collected(records, {"curves": curve, **files})


def changed(run, **fields):
    """The run with other values in its records."""
    return replace(run, records=[replace(each, **fields) for each in run.records])


def jsonl(path, rows):
    """Write rows as lines of JSON."""
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))


def breakdown(share):
    heights = [
        {"height": k, "nodes": 10000 // k, "error": min(0.9, share * k)} for k in range(1, 11)
    ]
    names = zip(("MIN", "MAX", "MED", "SM"), (0.5, 0.6, 1.5, 3), strict=True)
    operators = [{"operator": n, "nodes": 900, "error": share * k} for n, k in names]
    return {"by height": heights, "by operator": operators}


def picture():
    figure, content = Figure(figsize=(6, 3)), io.BytesIO()
    for k, axes in enumerate(figure.subplots(2, 4).flat):
        seeded = torch.Generator().manual_seed(k)
        axes.imshow(torch.randint(0, 3, (32, 32), generator=seeded).numpy())
        axes.set(xticks=[], yticks=[])
    figure.savefig(content, dpi=110)
    return content.getvalue()


def snapshots(mixer="dlr", layers=1, length=1024, states=64, channels=16):
    torch.manual_seed(0)
    options = {"d_state": states, "dt_min": 1e-3, "dt_max": 1e-1}
    model = build_model(ModelConfig(mixer, options, channels, layers), d_input=1, d_output=1)
    found = []
    for step in STEPS:
        found.append(json.loads(json.dumps(snapshot(model, step, length))))  # as a run writes it
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(
                    torch.randn_like(parameter), alpha=0.1 * float(parameter.abs().mean())
                )
    return found


def lengths():
    rows = []
    for k in range(8, 19):
        row = {"case": str(2**k), "B": max(1, 2 ** (16 - k)), "L": 2**k, "fused error": 1e-6}
        row |= {"fused": 0.4 + 2 ** (k - 16), "torch": 1.0 + 2.5 * 2 ** (k - 16), "fused GiB": 1.1}
        row |= {"listing": 2 + 6.0 * 2 ** (k - 15) if k < 18 else None}
        row |= {"attention bf16": 0.3 * 2 ** (k - 10)} if k <= 15 else {}
        row |= {"layer dss error": 1e-6, "layer dss": 0.8 + 2 ** (k - 15)}
        row |= {"layer attention bf16": 0.6 * 2 ** (k - 10)} if k <= 15 else {}
        rows.append({**row, "ceiling": 0.08 + 0.4 * 2 ** (k - 16)})
    return {"case": {}, "device": "made-up GPU", "threads": 1, "torch": "0.0", "cases": rows}


def step_times():
    names = ("dlr-1", "dss-1", "attention-1", "dlr-6", "attention-ff-1", "dlr-6-512")
    rows = [
        {"model": n, "L ms": k + 0.8, "L": 1.0 + k, "L paper": 1.0 + k}
        | {"2L ms": 2 * k + 0.8, "2L": 1.0 + 2 * k, "2L paper": None}
        for k, n in enumerate(names)
    ]
    higher = [
        {"task": "ListOps-SubTrees", "model": n, "ms": 9.0 * k, "relative": 1.0 * k, "paper": 8.0}
        for k, n in enumerate(("DLR", "DSS-exp", "LocalAttention"), start=1)
    ]
    higher.append({**higher[-1], "ms": 5.5, "relative": 0.5, "precision": "bf16"})
    where = {"case": {}, "device": "made-up GPU", "threads": 1, "torch": "0.0"}
    return {**where, "models": rows, "table3": higher}


def every_run():
    """A run or two for nearly every recipe, with all that can lie beside it."""
    runs = []
    for place, name in enumerate(recipes.RECIPES):
        if place % 11 == 7 or name.startswith("table5"):
            continue
        extras = {}
        if name.startswith("table3/listops-subtrees"):
            extras["breakdowns"] = breakdown(0.01 * (place % 4 + 1))
        if name.startswith("table3/pathfinder-segmentation-128"):
            extras["pictures"] = picture()
        if name in ("table1/shift/dlr-1", "table1/shift/dss-1", "table1/shift/dlr-6"):
            extras["snapshots"] = snapshots("dss" if "dss" in name else "dlr", 1 + ("6" in name))
        runs.append(run(name, **extras))
        if place % 5 == 0:
            runs.append(run(name, seed=1))
    runs.append(run("table2/65536/dlr", variant="fp32 phases"))
    return runs


def full():
    """Two seeds of everything, with curves of 100 points, and the layers of every DLR and DSS."""
    sizes = {"length": 4096, "states": 256, "channels": 32}
    layers = {
        name: [check_snapshot(each) for each in snapshots(mixer, count, **sizes)]
        for name, mixer, count in (("dlr", "dlr", 1), ("dss", "dss", 1), ("dlr-6", "dlr", 6))
    }
    runs = []
    for name in recipes.RECIPES:
        table, task, model = name.split("/")
        files = {"breakdowns": breakdown(0.02)} if "listops" in task else {}
        files |= {"pictures": picture()} if table == "table3" and "pathfinder" in task else {}
        mixer = model[:5] if model.startswith("dlr-6") else model[:3]
        files |= {"snapshots": layers[mixer]} if table != "table5" and mixer in layers else {}
        runs += [run(name, seed, points=100, **files) for seed in (0, 1)]
    return runs


def write(folder, runs=None):
    """A folder of results, and lengths.json beside it."""
    folder = Path(folder)
    add(runs or every_run(), folder / "results")
    (folder / "lengths.json").write_text(json.dumps(lengths()))
    (folder / "results" / "step-times.json").write_text(json.dumps(step_times()))
    notes = {"table1/select-fixed/dlr-1": "Made up: the rate of the paper is too large."}
    (folder / "results" / "notes.json").write_text(json.dumps(notes))
    return folder / "results"


if __name__ == "__main__":
    write(sys.argv[1])
