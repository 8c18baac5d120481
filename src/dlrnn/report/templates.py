"""The pages as Jinja2 templates in templates/. Every inserted text is escaped."""

from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined

from dlrnn.common.untrusted import printable
from dlrnn.paper.comparison import (
    OURS,
    SIGNS,
    count_text,
    no_verdict_text,
    our_number,
    paper_number,
    seeds_text,
    state_text,
    steps_text,
)
from dlrnn.paper.numbers import METRICS, signed
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

NEAR = "“As in the paper” is within .03 (R², loss) or 1.5 points (percent)."
COLOURED = (
    "A cell has a colour if its runs have the paper's sizes and steps, or reach the paper's number"
    " in fewer steps; other cells say how they differ."
)
WORDS = {"better": "better than the paper", "near": "as in the paper", "worse": "worse"}


@cache
def environment() -> Environment:
    """The environment of all templates, with the functions that they call."""
    made = Environment(
        loader=PackageLoader("dlrnn.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals |= {
        "COLOURED": COLOURED,
        "METRICS": METRICS,
        "MOST_PROBLEMS": MOST_PROBLEMS,
        "NEAR": NEAR,
        "OURS": OURS,
        "PAGES": PAGES,
        "SIGNS": SIGNS,
        "WORDS": WORDS,
        "plots": plots,
    }
    functions = (count_text, no_verdict_text, our_number, paper_number, seeds_text)
    for function in (*functions, state_text, steps_text, signed, plots.shown):
        made.globals[function.__name__] = function
    made.filters["printable"] = printable
    return made


def render(template: str, **values: object) -> str:
    """The page of a template."""
    return environment().get_template(f"{template}.html").render(values)
