"""How the previews of the atomic tasks draw sequences."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE, ORANGE, GRAY = "#0072b2", "#d55e00", "#b0b0b0"
LONGEST = 160  # positions that are drawn one by one; longer sequences are lines


def sequence(axes: "Axes", values: Tensor, start: int = 0, *, colours: Any = BLUE) -> None:
    """Draw one number for each position, `values` [T] or [T, 1], with one colour or T of them."""
    place, numbers = np.arange(start, start + len(values)), values.flatten().numpy()
    if len(numbers) > LONGEST:
        one_colour = colours if isinstance(colours, str) else BLUE
        axes.plot(place, numbers, linewidth=0.8, color=one_colour)
        return
    axes.axhline(0, color="black", linewidth=0.6)
    axes.vlines(place, 0, numbers, colors=colours, linewidth=1.4, alpha=0.6)
    axes.scatter(place, numbers, c=colours, s=16, zorder=3)


def legend(axes: "Axes", names: Mapping[str, str]) -> None:
    """Explain colours, each given with its text: `{text: colour}`."""
    for text, colour in names.items():
        axes.plot([], [], "o", color=colour, label=text)
    axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 0.98), ncols=len(names))


def by_value(values: Tensor) -> Any:
    """Return a colour for each number, from the smallest to the largest."""
    from matplotlib import colormaps

    low, high = values.min(), values.max()
    return colormaps["viridis"](((values - low) / (high - low).clamp(min=1e-9)).numpy() * 0.95)


def rows(axes: "Axes", values: Tensor, names: Sequence[str]) -> None:
    """Draw the features of [T, features] as rows of an image, named on the left."""
    look: dict[str, Any] = {"aspect": "auto", "interpolation": "nearest", "cmap": "RdBu_r"}
    axes.imshow(values.T.numpy(), vmin=-1, vmax=1, **look)
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", length=0)


def source_of(values: Tensor, x: Tensor) -> Tensor:
    """Return the position in x of each value that was copied from it."""
    order = x.argsort()
    return order[torch.searchsorted(x[order], values.flatten())]


def box(axes: "Axes", place: int, first: int, last: int, text: str) -> None:
    """Frame the rows `first .. last - 1` at a position of an image, with a text beside them."""
    from matplotlib.patches import Rectangle

    corner, size = (place - 0.5, first - 0.5), (1, last - first)
    axes.add_patch(Rectangle(corner, *size, fill=False, edgecolor="black", linewidth=2, zorder=5))
    look = {"boxstyle": "round,pad=0.2", "facecolor": "white", "edgecolor": "none"}
    on_left = place > axes.get_xlim()[1] / 2
    middle = (place - 1 if on_left else place + 1, (first + last - 1) / 2)
    side = "right" if on_left else "left"
    axes.text(*middle, text, ha=side, va="center", bbox=look, zorder=6)


def region(axes: "Axes", start: int, stop: int, text: str) -> None:
    """Shade the positions from `start` to `stop` and write a text above them."""
    axes.axvspan(start - 0.5, stop - 0.5, color="0.93", zorder=0)
    middle = ((start + stop - 1) / 2, 0.97)
    where = axes.get_xaxis_transform()
    axes.text(*middle, text, ha="center", va="top", transform=where, color="0.4", fontsize=10)


def frame(above: "Axes", below: "Axes", length: int, start: int) -> None:
    """Name both panels; the target has positions from `start` on."""
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        if not axes.images:
            axes.margins(y=0.14)
    above.set_title("input", loc="left", color=BLUE)
    below.set_title("target", loc="left", color=BLUE)
    if start:
        region(below, 0, start, "output ignored here")
    below.set(xlabel="position", xlim=(-0.5, length - 0.5))
