"""The paper's figures: images with their masks, predicted masks, and errors on ListOps-SubTrees."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Shaped

from dlrnn import tasks
from dlrnn.common.figures import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INCHES = 2.2
"""The side of an image."""
IMAGE, MASK = (-1, 1), (0, 2)
"""The values that are white and black: of pixels, and of the classes of a mask."""
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#767676")

Breakdown = dict[str, list[dict[str, Any]]]
"""Rows "by height" and "by operator", as `analysis.listops_errors.error_rates` returns them."""


class Images(NamedTuple):
    """A row of images of one kind, with its name and the values that are white and black."""

    name: str
    pixels: Shaped[np.ndarray, "images side side"]
    limits: tuple[float, float]


def pathfinder_images(
    resolution: int = 256, samples: int = 4, *, split: str = "validation", seed: int = 0
) -> list[Images]:
    """Images of Pathfinder-Segmentation and, below them, their masks: the paper's Figure 1."""
    task = tasks.get("pathfinder-segmentation", resolution=resolution, seed=seed)
    batch = task.sample(samples, split=split)
    size = (samples, resolution, resolution)
    return [
        Images(f"image, {resolution} × {resolution}", batch.inputs.view(size).numpy(), IMAGE),
        Images("mask", batch.targets.view(size).numpy(), MASK),
    ]


def plot_images(rows: Sequence[Images]) -> "Figure":
    """Rows of images, black on white; the name of a row stands at its left."""
    columns = max(len(row.pixels) for row in rows)
    figure = new_figure(INCHES * columns + 0.4, INCHES * len(rows))
    axes = figure.subplots(len(rows), columns, squeeze=False)
    for line, row in zip(axes, rows, strict=True):
        for place, each in enumerate(line):
            each.set(xticks=[], yticks=[])
            if place >= len(row.pixels):
                each.set_visible(False)
                continue
            low, high = row.limits
            each.imshow(row.pixels[place], cmap="gray_r", vmin=low, vmax=high)
        line[0].set_ylabel(row.name, fontsize=9)
    return figure


def plot_errors(breakdowns: Mapping[str, Breakdown], of: str) -> "Figure":
    """Left: wrong sub-trees in percent by height. Right: by operator. A colour for each model."""
    figure = new_figure(10, 4)
    left, right = figure.subplots(1, 2)
    operators = [row["operator"] for row in next(iter(breakdowns.values()))["by operator"]]
    width = 0.8 / len(breakdowns)
    for place, (name, found) in enumerate(breakdowns.items()):
        look = {"color": COLOURS[place % len(COLOURS)], "label": name}
        known = [row for row in found["by height"] if row["error"] is not None]
        heights, errors = [row["height"] for row in known], [100 * row["error"] for row in known]
        left.plot(heights, errors, marker="o", markersize=4, **look)
        known = [row for row in found["by operator"] if row["error"] is not None]
        across = [operators.index(row["operator"]) - 0.4 + (place + 0.5) * width for row in known]
        right.bar(across, [100 * row["error"] for row in known], width, **look)
    left.set(xlabel="height of the sub-tree", ylabel="wrong, %")
    right.set(xlabel="operator", ylabel="wrong, %")
    right.set_xticks(range(len(operators)), operators)
    figure.suptitle(f"Errors on ListOps-SubTrees, {of}", fontsize=10)
    for axes in (left, right):
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
    left.legend(frameon=False)
    return figure
