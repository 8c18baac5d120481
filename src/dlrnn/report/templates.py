"""The pages as Jinja2 templates in templates/. Every inserted text is escaped."""

from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined

from dlrnn.common.untrusted import printable
from dlrnn.paper import comparison, counts, numbers
from dlrnn.report import plots

PAGES = {
    "index": "Overview",
    **{f"table{k}": f"Table {k}" for k in range(1, 7)},
    "speed": "Speed",
    "listops": "ListOps",
    "pathfinder": "Pathfinder",
    "explorer": "Explorer",
}
"""The pages and their titles in the navigation."""

MOST_PROBLEMS = 200
"""The most sentences on a page about what could not be read."""

NEAR = (
    "“As in the paper” is within .03 (R², loss) or 1.5 points (percent), and so is at least one"
    " seed; strictly, the last evaluation of seed 0 is."
)
COLOURED = (
    "A cell has a colour if its runs have the paper's sizes, schedule and steps, or reach the"
    " paper's number in fewer steps; other cells say how they differ."
)
WORDS = {"better": "better than the paper", "near": "as in the paper", "worse": "worse"}
WORDS |= {"apart": "only the mean is near the paper, no seed"}


@cache
def environment() -> Environment:
    """The environment of all templates, with the modules and the words that they use."""
    made = Environment(
        loader=PackageLoader("dlrnn.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals |= {"comparison": comparison, "counts": counts, "numbers": numbers}
    made.globals |= {"plots": plots}
    made.globals |= {"PAGES": PAGES, "MOST_PROBLEMS": MOST_PROBLEMS}
    made.globals |= {"NEAR": NEAR, "COLOURED": COLOURED, "WORDS": WORDS}
    made.filters["printable"] = printable
    return made


def render(template: str, **values: object) -> str:
    """The page of a template."""
    return environment().get_template(f"{template}.html").render(values)
