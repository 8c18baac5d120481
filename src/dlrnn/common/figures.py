"""Figures; matplotlib, which takes half a second to import, is imported by the first one."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(width: float | int, height: float | int) -> "Figure":
    """An empty figure of this size in inches, whose parts do not overlap."""
    is_first = "matplotlib" not in sys.modules
    import matplotlib as mpl
    from matplotlib.figure import Figure

    if is_first and Path(mpl.matplotlib_fname()).absolute() == Path("matplotlibrc").absolute():
        mpl.rcdefaults()  # settings in the current folder could run LaTeX
    return Figure(figsize=(width, height), layout="constrained")
