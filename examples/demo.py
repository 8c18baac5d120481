"""Train DLR and attention on two tasks, in two minutes on two CPU cores: `make demo`.

Shift needs long kernels, and DLR solves it. CumMax cannot be computed with a fixed kernel:
attention solves it, and one layer of DLR does not. The table also shows the paper's numbers, which
are from larger models.
"""

import shutil
from pathlib import Path

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from dlrnn.models import ModelConfig
from dlrnn.paper import recipes
from dlrnn.train import RunConfig, TaskConfig, load_best, train

OUT = Path("out/demo")
LENGTH, CHANNELS, STATES = 256, 64, 512
MODELS = {
    "dlr": ModelConfig("dlr", {"d_state": STATES, "dt_min": 1e-3, "dt_max": 1e-3}, CHANNELS),
    "attention": ModelConfig("attention", {"heads": 4}, CHANNELS),
}
EVERY = {"log_every": 10, "eval_every": 175, "eval_batches": 8, "checkpoint_every": 350}


def run_of(task: str, model: str) -> RunConfig:
    return RunConfig(
        TaskConfig(task, {"length": LENGTH}),
        MODELS[model],
        steps=800,
        batch_size=16,
        lr=2e-3,
        **EVERY,
    )


def draw(path: Path) -> None:
    """Draw three learned kernels of Shift, the eigenvalues, and a prediction with its target."""
    model, task, _, _ = load_best(OUT / "shift-dlr", torch.device("cpu"))
    layer = model.blocks[0].mixer
    figure = Figure(figsize=(13, 4), layout="constrained")
    kernel, spectrum, prediction = figure.subplots(1, 3)
    with torch.no_grad():
        entries, (_, log_lambda, _) = layer.kernel(LENGTH), layer.modes()
    loudest = entries.norm(dim=1).argsort(descending=True)[:3]
    kernel.plot(entries[loudest].T, linewidth=1)
    kernel.set(title="three learned kernels", xlabel="position")
    size, phase = log_lambda[:, 0].exp(), log_lambda[:, 1]
    weight = layer.W.detach().norm(dim=(0, 2))
    circle = torch.linspace(0, 2 * torch.pi, 200)
    spectrum.plot(circle.cos(), circle.sin(), color="#cccccc", linewidth=0.8)
    spectrum.scatter(size * phase.cos(), size * phase.sin(), c=weight, s=8, cmap="viridis")
    spectrum.set(title="eigenvalues, brighter where the weights are", aspect="equal")
    batch = task.sample(1, split="test")
    with torch.inference_mode():
        answer = model(batch.inputs)[0, :, 2]
    prediction.plot(batch.targets[0, :, 2], color="#bbbbbb", linewidth=3, label="target")
    prediction.plot(answer, color="#0072b2", linewidth=1, label="prediction")
    prediction.set(title="Shift by L/4: target and prediction", xlabel="position")
    prediction.legend(frameon=False)
    figure.savefig(path, dpi=110)


def main() -> None:
    torch.set_num_threads(1)  # two threads on two busy cores would wait for each other
    shutil.rmtree(OUT, ignore_errors=True)
    table = Table(title="R2 on held-out sequences")
    for name in ("task", "model", "paper, L 4096", f"here, L {LENGTH}", "minutes"):
        table.add_column(name, justify="left" if name in ("task", "model") else "right")
    for task in ("shift", "cummax"):
        for model in MODELS:
            result = train(OUT / f"{task}-{model}", run_of(task, model))
            paper = recipes.get(f"table1/{task}/{model}-1").paper["R2"]
            minutes = result["seconds"] / 60
            table.add_row(task, model, f"{paper:g}", f"{result['value']:.3f}", f"{minutes:.1f}")
    draw(OUT.parent / "demo.png")
    Console().print(table)
    print(f"pictures of kernels, eigenvalues and a prediction: {OUT.parent / 'demo.png'}")


if __name__ == "__main__":
    main()
