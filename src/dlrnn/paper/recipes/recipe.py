"""The definition of a recipe."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from dlrnn.paper.recipes.cost import minutes
from dlrnn.train import RunConfig

DSS_NOTE = "Lambda starts at the authors' program's frequencies, pi n; the paper's text has 2 pi n"


@dataclass(frozen=True)
class Recipe:
    """One number of the paper and the run that reproduces it.

    Attributes:
        name: `table/task/model`, "table1/shift/dlr-1".
        config: the complete run, at the paper's sizes.
        paper: the paper's values by metric, in the paper's units.
        note: what differs from the other recipes of the table; "" if nothing does.
    """

    name: str
    config: RunConfig
    paper: dict[str, float]
    note: str = ""

    @cached_property
    def cost(self) -> float:
        """Expected minutes on one H200, an estimate."""
        return minutes(self.config)


Builders = dict[str, Callable[[], Recipe]]
"""By name, a function that builds the recipe."""


def recipe(name: str, config: RunConfig, paper: dict[str, float], *notes: str) -> Recipe:
    """A recipe with the notes that are not empty, and one on DSS's frequencies."""
    every = (*notes, DSS_NOTE if config.model.mixer == "dss" else "")
    return Recipe(name, config, paper, "; ".join(filter(None, every)))
