"""What a recipe is."""

from dataclasses import dataclass

from dlrnn.paper.recipes.cost import minutes
from dlrnn.train import RunConfig

PLACES = {"R2": 3, "train_loss": 2, "loss": 2}
"""Metrics of the paper that are no percentages, and the places behind the point that are shown."""

PERCENTAGES = {"accuracy", "macro_f1", "macro_accuracy"}
"""Metrics that the paper gives in percent."""


@dataclass(frozen=True)
class Recipe:
    """One number of the paper, and how to get it.

    Attributes:
        name: `table/task/model`, "table1/shift/dlr-1".
        config: the complete run, at the paper's sizes.
        paper: the paper's values by metric, in the paper's units.
        cost: expected minutes on one H200, an estimate.
        note: what is special; "" if nothing is.
    """

    name: str
    config: RunConfig
    paper: dict[str, float]
    cost: float
    note: str = ""


DSS_NOTE = "Lambda starts at the authors' program's frequencies, pi n; the paper's text has 2 pi n"


def recipe(name: str, config: RunConfig, paper: dict[str, float], *notes: str) -> Recipe:
    """A recipe with its estimated cost; notes that are "" are left out."""
    every = (*notes, DSS_NOTE if config.model.mixer == "dss" else "")
    return Recipe(name, config, paper, minutes(config), "; ".join(filter(None, every)))


def as_in_paper(metric: str, value: float) -> float:
    """A metric of ours in the paper's units: accuracies and F1 in percent, the others as they are.

    The only place that converts: records and results hold fractions, `Recipe.paper` does not.
    """
    return 100 * value if metric in PERCENTAGES else value
