"""Pictures; matplotlib, which takes half a second to import, comes with the first one."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(width: float | int, height: float | int) -> "Figure":
    """An empty one, in inches, whose parts keep clear of each other."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")
