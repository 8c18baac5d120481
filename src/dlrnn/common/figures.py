"""Pictures; matplotlib, which takes half a second to import, comes with the first one."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(width: float | int, height: float | int) -> "Figure":
    """An empty one, in inches, whose parts keep clear of each other."""
    is_first = "matplotlib" not in sys.modules
    import matplotlib as mpl
    from matplotlib.figure import Figure

    if is_first and Path(mpl.matplotlib_fname()).absolute() == Path("matplotlibrc").absolute():
        mpl.rcdefaults()  # a file of the current folder, which could have LaTeX run
    return Figure(figsize=(width, height), layout="constrained")
