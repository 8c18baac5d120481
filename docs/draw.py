"""Draw every picture of docs/, and write the generated tables of docs/maths.md and docs/tasks.md.

Run it with `make pictures`.
"""

import copy
import itertools
import json
import math
from io import BytesIO
from pathlib import Path

import torch
from matplotlib.figure import Figure
from PIL import Image

from dlrnn import DLR, ops, tasks
from dlrnn.analysis import (
    compress,
    layer_of,
    plot_kernel,
    plot_spectrum,
    prod_as_dlr,
    shift_weight_norms,
    system_of,
)
from dlrnn.analysis.figures import pathfinder_images, plot_images
from dlrnn.cli import main as main_command
from dlrnn.nn import TapeDLR
from dlrnn.paper.results import read_results
from dlrnn.report.picture import table1_png

DOCS = Path(__file__).parent
PICTURES = DOCS / "pictures"
BLUE, ORANGE, GREEN, GREY = "#0072b2", "#d55e00", "#009e73", "#999999"


def main() -> None:
    """Draw all pictures and write all tables."""
    PICTURES.mkdir(exist_ok=True)
    torch.manual_seed(0)
    layer = DLR(64, 256)
    save(plot_spectrum(layer), "spectrum")
    save(plot_kernel(layer, 256), "kernel")
    save(two_views(), "two-views")
    save(phases(), "phases")
    save(real_against_complex(), "real-lambda")
    save(compression(), "compress")
    save(read_head(), "read-head")
    save(time_against_length(), "time-against-length")
    save(tasks.get("pathfinder-segmentation").preview(), "pathfinder")
    save(tasks.get("listops-subtrees").preview(), "listops")
    save(plot_images(pathfinder_images(256)), "pathfinder-256")
    recorded_errors()
    task_previews()
    catalogue_scores()
    table1()


def save(figure: Figure, name: str) -> None:
    """Write docs/pictures/NAME.png."""
    figure.savefig(PICTURES / f"{name}.png", dpi=110)
    print(f"drawn: docs/pictures/{name}.png")


def table1() -> None:
    """Draw the paper's Table 1 and ours, from results/; `make report` draws it, too."""
    drawn = table1_png([read_results(DOCS.parent / "results", "ours")])
    (PICTURES / "table1.png").write_bytes(drawn)
    print("drawn: docs/pictures/table1.png")


def recorded_errors() -> None:
    """Draw the errors by height and operator in results/, as `dlrnn figure errors` does."""
    given = ["--results", str(DOCS.parent / "results")]
    main_command(["figure", "errors", *given, "--out", str(PICTURES / "listops-errors.png")])


def task_previews() -> None:
    """Draw a sample of every atomic task at length 64, in docs/pictures/tasks/."""
    (PICTURES / "tasks").mkdir(exist_ok=True)
    for name, task in tasks.TASKS.items():
        if task.kind == "regression":
            marked = {"marked": 8} if name.startswith("select") else {}
            figure = tasks.get(name, length=64, **marked).preview()
            drawn = BytesIO()
            figure.savefig(drawn, dpi=900 / figure.get_figwidth())
            small = Image.open(drawn).convert("RGB").quantize(48)  # a palette: a third of the bytes
            small.save(PICTURES / "tasks" / f"{name}.png", optimize=True)
            print(f"drawn: docs/pictures/tasks/{name}.png")


def catalogue_scores() -> None:
    """Write the scores of docs/tasks.md: ours of Table 1, in docs/results.md, the paper's below."""
    section = (DOCS / "results.md").read_text().split("## Table 1")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line[:2] == "| "]
    header, cells = rows[0], rows[2:]
    at = {name: header.index(name) for name in ("task", "model", "paper", "ours")}
    models = list(dict.fromkeys(row[at["model"]] for row in cells))[:6]
    lines = [f"| task | {' | '.join(models)} |", "|---" * 7 + "|"]
    scores = {
        (row[at["task"]], row[at["model"]]): (row[at["ours"]], row[at["paper"]]) for row in cells
    }
    for task in dict.fromkeys(row[at["task"]] for row in cells):
        values = ["{} ({})".format(*scores[task, model]) for model in models]
        lines.append(f"| {task} | {' | '.join(values)} |")
    replace("scores", "\n".join(lines), page="tasks")


def time_against_length() -> Figure:
    """Draw what `dlrnn bench lengths --json` measured on one H200 (docs/measured/lengths.json)."""
    measured = json.loads((DOCS / "measured" / "lengths.json").read_text())
    rows, names = measured["cases"], {"fused": "DLR, our kernels", "torch": "DLR, plain PyTorch"}
    names |= {"attention bf16": "attention, bf16, without projections"}
    names |= {"listing": "DLR, the paper's listing"}
    names |= {"ceiling": "ceiling for DLR: its bytes and FLOP\nat the H200's rates (not measured)"}
    looks = dict(zip(names, ("-", "-", "-", "-", ":"), strict=True))
    colours = dict(zip(names, (BLUE, GREEN, ORANGE, "#cc79a7", GREY), strict=True))
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    for name, label in names.items():
        known = [(row["L"], row[name]) for row in rows if row.get(name)]
        lengths, times = zip(*known, strict=True)
        axes.loglog(lengths, times, looks[name], marker=".", color=colours[name], label=label)
        axes.annotate(f"{times[-1]:.3g}", (lengths[-1], times[-1]), (4, 0), fontsize=8,
                      textcoords="offset points", va="center", color=colours[name])  # fmt: skip
    both = [
        (row["L"], row["fused"], row["attention bf16"]) for row in rows if "attention bf16" in row
    ]
    for (l0, d0, a0), (l1, d1, a1) in itertools.pairwise(both):
        if a0 <= d0 and a1 > d1:  # they cross between
            share = math.log(d0 / a0) / (math.log(d0 / a0) + math.log(a1 / d1))
            length = l0 * (l1 / l0) ** share
            axes.axvline(length, color=GREY, linestyle="--", linewidth=0.9)
            axes.text(length * 1.06, 0.15, f"from {length:.0f} on DLR is faster", fontsize=9)
    axes.set_xticks([row["L"] for row in rows], [f"{row['L']:,}" for row in rows], rotation=30)
    axes.minorticks_off()
    axes.set(xlabel="length", ylabel="forward + backward, ms", xlim=(200, 2**18 * 1.6))
    axes.set_title(
        f"One layer, H 128, N 1024, 65,536 positions or one sequence, {measured['device']}"
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure


def two_views() -> Figure:
    """Draw one output, computed by the recurrence and by the convolution."""
    length = 120
    log_lambda = torch.tensor([[-0.02, 0.0], [-0.03, 0.35]], dtype=torch.float64)
    W = torch.tensor([[[0.5, 0.0], [1.0, 0.0]]], dtype=torch.float64)
    u = torch.zeros(1, length, 1, dtype=torch.float64)
    u[0, [5, 40, 46, 80], 0] = torch.tensor([1.0, 0.8, -1.2, 0.6], dtype=torch.float64)
    kernel = ops.vandermonde(W, log_lambda, length)
    whole = ops.convolution(u, kernel)[0, :, 0]
    state, steps, states = torch.zeros(1, 1, 2, 2, dtype=torch.float64), [], []
    for u_t in u.unbind(1):
        y, state = ops.step(u_t, W, log_lambda, state)
        steps.append(y.item())
        states.append(state[0, 0, :, 0])
    modes = torch.stack(states)

    figure = Figure(figsize=(10, 6), layout="constrained")
    top, left, right, bottom = figure.subplot_mosaic(
        [["u", "u"], ["x", "K"], ["y", "y"]], height_ratios=(0.6, 1, 1)
    ).values()
    top.stem(u[0, :, 0], linefmt="k-", markerfmt="k.", basefmt=" ")
    top.set(title="input u", xlim=(-1, length))
    left.plot(modes[:, 0], color=GREEN, label="Re x, lambda = exp(-0.02)")
    left.plot(modes[:, 1], color=ORANGE, label="Re x, lambda = exp(-0.03 + 0.35 i)")
    left.set(title="as an RNN: two states", xlim=(-1, length))
    left.legend(frameon=False, fontsize=8)
    right.plot(kernel[0], color=BLUE)
    right.set(title="as a convolution: one kernel", xlim=(-1, length))
    bottom.plot(whole, color=BLUE, linewidth=4, alpha=0.4, label="convolution")
    bottom.plot(steps, "k.", markersize=3, label="step by step")
    bottom.set(title="output y", xlabel="position", xlim=(-1, length))
    bottom.legend(frameon=False)
    return tidy(figure)


def phases() -> Figure:
    """Draw the error of the fp32 kernel against float64 by position, with |lambda| near 1."""
    states, length, width = 1024, 2**20, 64
    im = 2 * math.pi * torch.arange(states) / states
    re = torch.full((states,), 1e-4)
    W = torch.randn(1, states, 2) / states
    log_lambda = torch.stack((-(re.double() ** 2), im.double()), dim=-1)
    ours = ops.vandermonde(W, log_lambda, length)[0]
    starts = sorted({int(2 ** (e / 2)) for e in range(12, 40)} | {length - width})
    positions, rounded, exact = [], [], []
    for start in starts:
        k = torch.arange(start, start + width)
        single = torch.complex(-(re**2), im)[:, None] * k
        weight = torch.view_as_complex(W)[0]
        double = torch.view_as_complex(log_lambda.contiguous())[:, None] * k
        truth = (weight.to(torch.complex128) @ double.exp()).real
        positions.append(start)
        rounded.append(error((weight @ single.exp()).real, truth))
        exact.append(error(ours[k], truth))
    figure = Figure(figsize=(7.5, 4), layout="constrained")
    axes = figure.subplots()
    axes.loglog(positions, rounded, ".-", color=ORANGE, label="exp(k log lambda) in fp32")
    axes.loglog(positions, exact, ".-", color=BLUE, label="dlrnn (two float64 tables)")
    axes.set(xlabel="position k", ylabel="relative error of the kernel")
    axes.axhline(1e-5, color=GREY, linewidth=0.8, linestyle="--")
    axes.legend(frameon=False)
    return tidy(figure)


def real_against_complex() -> Figure:
    """Draw how large w must be to shift by N - 1, and write the table of docs/maths.md."""
    rows = shift_weight_norms([2, 4, 8, 16, 32, 64, 128])
    header = "| N = L | max w, real lambda | max w, complex lambda | condition, real | complex |"
    lines = [
        f"| {row.N} | 2^{row.log2_real:.1f} | 2^{row.log2_complex:.1f} |"
        f" {shown(row.condition_real)} | {shown(row.condition_complex)} |"
        for row in rows
    ]
    replace("shift weights", "\n".join((header, "|---|---|---|---|---|", *lines)))
    figure = Figure(figsize=(7.5, 4), layout="constrained")
    axes = figure.subplots()
    sizes = [row.N for row in rows]
    axes.plot(sizes, [row.log2_real for row in rows], "o-", color=ORANGE, label="real lambda")
    bound = [2 * n - 3 - math.log2(n) for n in sizes]
    axes.plot(sizes, bound, "--", color=GREY, label="bound: 2 N - 3 - log2 N")
    axes.plot(sizes, [row.log2_complex for row in rows], "o-", color=BLUE, label="complex lambda")
    axes.set(xlabel="states N", ylabel="log2 of the largest weight")
    axes.legend(frameon=False)
    return tidy(figure)


def compression() -> Figure:
    """Draw error and bound of `compress` for a DLR-prod of 16 states, written as a DLR."""
    torch.manual_seed(0)
    layer = layer_of(prod_as_dlr(system_of(DLR(4, 16, cast="prod"))))
    sizes = [8, 16, 32, 48, 64, 80, 96, 112, 128]
    results = [compress(layer, size) for size in sizes]
    largest = results[0].singular_values[0].item()
    lines = [
        f"| {r.layer.d_state} | {r.error / largest:.1e} | {r.bound / largest:.1e} |"
        for r in results
    ]
    replace("compress", "\n".join(("| states | error | bound |", "|---|---|---|", *lines)))
    figure = Figure(figsize=(7.5, 4), layout="constrained")
    axes = figure.subplots()
    used = [r.layer.d_state for r in results]
    axes.semilogy(used, [r.bound / largest for r in results], "o--", color=GREY, label="bound")
    axes.semilogy(used, [r.error / largest for r in results], "o-", color=BLUE, label="error")
    axes.set(
        xlabel=f"states kept, of {layer.d_state}", ylabel="relative to the largest singular value"
    )
    axes.legend(frameon=False)
    return tidy(figure)


def read_head() -> Figure:
    """Draw what a head reads in two contexts of ContextShift, while it learns to find the place."""
    places, steps, contexts = 32, (0, 50, 75, 150), ((6, BLUE), (20, ORANGE))
    learned = learning_to_shift(places, steps)
    figure = Figure(figsize=(10, 4.6), layout="constrained")
    grid = figure.add_gridspec(2, 2, width_ratios=(0.8, 1.4))
    circle = figure.add_subplot(grid[:, 0], projection="polar")
    angles = [2 * math.pi * j / places for j in range(places)]
    last = places - 1
    circle.plot(angles, [1.0] * places, "o", color=GREY, markersize=4)
    circle.plot(angles[last], 1, "ks", markersize=8)
    circle.annotate(f"write\n{last}", (angles[last], 1.27), ha="center", va="center")
    for row, (shift, colour) in enumerate(contexts):
        angle = angles[last - shift]
        circle.annotate("", (angle, 0.95), (angle, 0), arrowprops={"color": colour, "width": 1.5})
        text = f"s = {shift}\nread {last - shift}"
        circle.annotate(text, (angle, 1.27), ha="center", va="center", color=colour)
        axes = figure.add_subplot(grid[row, 1])
        axes.axvline(last - shift, color=GREY, linewidth=0.8, linestyle="--")
        for step, alpha in zip(steps, (0.25, 0.45, 0.7, 1.0), strict=True):
            weights = read_weights(learned[step], shift)
            axes.plot(range(2, places), weights, ".-", color=colour, alpha=alpha,
                      label=f"step {step}")  # fmt: skip
        axes.set(title=f"s = {shift}", ylabel="read weight", xlim=(0, places))
        axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    axes.set(xlabel="place on the tape")
    circle.set(yticks=[], xticks=[], ylim=(0, 1.4), title=f"a tape of {places} places")
    circle.spines["polar"].set_visible(False)
    figure.axes[1].sharex(axes)
    for each in figure.axes[1:]:
        each.spines[["top", "right"]].set_visible(False)
    return figure


def learning_to_shift(length: int, steps: tuple[int, ...]) -> dict[int, TapeDLR]:
    """Train one head on ContextShift; return the layer after each of these numbers of steps."""
    torch.manual_seed(1)
    task, found = tasks.get("context-shift", length=length), {}
    layer = TapeDLR(5, length, heads=1, d_head=4, kernels=4, hold=2).double()
    with torch.no_grad():  # channels 3 and 4 hold the first two inputs
        for parameter in layer.held.parameters():
            parameter.zero_()
        layer.held.weight[3, 0] = layer.held.weight[4, 5] = 1
    layer.held.requires_grad_(False)
    optimizer = torch.optim.Adam((p for p in layer.parameters() if p.requires_grad), lr=2e-2)
    for step in range(max(steps) + 1):
        if step in steps:
            found[step] = copy.deepcopy(layer)
        batch = task.sample(32, step=step)
        y = layer(torch.nn.functional.pad(batch.inputs.double(), (0, 2)))[..., :1]
        optimizer.zero_grad()
        (y - batch.targets)[:, 2:].square().mean().backward()
        optimizer.step()
    return found


@torch.no_grad()
def read_weights(layer: TapeDLR, shift: int) -> torch.Tensor:
    """Return the weights of the inputs 2, 3, ... in the last output, where the shift is given."""
    places, angle = layer.length, 2 * math.pi * shift / layer.length
    x = torch.zeros(places - 1, places, 5, dtype=torch.float64)
    x[:, 0, 0], x[:, 1, 0] = math.cos(angle), math.sin(angle)
    x[1:, 2:, 0] = torch.eye(places - 2)
    y = layer(x)[:, -1, 0]
    return y[1:] - y[0]


def error(value: torch.Tensor, truth: torch.Tensor) -> float:
    """Return ||value - truth|| / ||truth||."""
    return float((value.double() - truth).norm() / truth.norm())


def shown(number: float) -> str:
    """Format a condition number."""
    return f"{number:.2g}" if number < 1e15 else "> 1e15"


def tidy(figure: Figure) -> Figure:
    """Remove the right and upper edges of all axes."""
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def replace(name: str, text: str, page: str = "maths") -> None:
    """Put text between `<!-- NAME -->` and `<!-- /NAME -->` of docs/PAGE.md."""
    path = DOCS / f"{page}.md"
    before, rest = path.read_text().split(f"<!-- {name} -->\n")
    _, after = rest.split(f"<!-- /{name} -->")
    path.write_text(f"{before}<!-- {name} -->\n\n{text}\n\n<!-- /{name} -->{after}")


if __name__ == "__main__":
    main()
