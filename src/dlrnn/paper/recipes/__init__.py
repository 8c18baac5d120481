"""One recipe for each number of the paper's Tables 1 to 6: a complete run and the paper's value.

    from dlrnn.paper import recipes
    recipes.get("table1/shift/dlr-1").config
    recipes.reproduce("table1", only="shift/dlr-1", scale="tiny")

`dlrnn recipes` lists them.
"""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatch
from importlib import import_module
from typing import Any

from dlrnn.common.suggestions import suggestion
from dlrnn.paper.recipes import table1, table2, table3, table4, table5
from dlrnn.paper.recipes.recipe import Recipe, Scale, scaled

__all__ = ["RECIPES", "TABLES", "Recipe", "Scale", "chosen", "get", "scaled"]

_BY_TABLE = {
    "table1": table1.RECIPES,
    "table2": table2.RECIPES,
    "table3": table3.RECIPES,
    "table4": table4.RECIPES,
    "table5": table5.RECIPES,
    "table6": table1.RECIPES_OF_TABLE_6,
}
RECIPES: dict[str, Recipe] = {each.name: each for table in _BY_TABLE.values() for each in table}
"""Every recipe by its name."""
TABLES = {table: tuple(each.name for each in recipes) for table, recipes in _BY_TABLE.items()}
"""The names of the recipes of each table."""


def __getattr__(name: str) -> Any:
    """The functions `reproduce` and `sweep`; their modules import this package."""
    if name in ("reproduce", "sweep"):
        return getattr(import_module(f"dlrnn.paper.{name}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def get(name: str) -> Recipe:
    """The recipe of that name."""
    if name in RECIPES:
        return RECIPES[name]
    if below := _below(name):
        more = f" and {len(below) - 3} more" if len(below) > 3 else ""
        raise ValueError(f"{name} is several recipes: {', '.join(below[:3])}{more}")
    if "*" in name:
        raise ValueError(f"{name!r} is a pattern: `dlrnn sweep` trains several recipes")
    tasks = [each for each in RECIPES if each.split("/")[1] == name]
    how = f"name one of {', '.join(tasks)}" if tasks else advice(name, list(RECIPES))
    raise ValueError(f"there is no recipe {name!r}: {how}")


def chosen(asked: Iterable[str]) -> list[Recipe]:
    """The recipes of names, of beginnings (`table1`, `table1/shift`) or patterns, each once."""
    found: dict[str, Recipe] = {}
    for each in asked:
        names = _below(each) or [name for name in RECIPES if fnmatch(name, each)]
        if not names:
            raise ValueError(f"there is no recipe {each!r}: {advice(each, _ways_to_ask())}")
        found |= {name: RECIPES[name] for name in names}
    return list(found.values())


def _below(name: str) -> list[str]:
    return [each for each in RECIPES if each.startswith(f"{name.rstrip('/')}/")]


def _ways_to_ask() -> list[str]:
    """All names, and patterns with a star in place of one or two of their parts."""
    known: dict[str, None] = {}
    for name in RECIPES:
        table, task, model = name.split("/")
        ways = (f"{table}/*", f"{table}/{task}/*", f"{table}/*/{model}", f"*/{task}/*")
        known |= dict.fromkeys((*ways, f"*/{model}", name))
    return list(known)


def advice(name: str, known: Sequence[str]) -> str:
    """Suggest the first name that begins with `name`, or the nearest one."""
    begun = next((each for each in known if each.startswith(name.lower())), None)
    return (
        f"did you mean {begun!r}?"
        if begun
        else suggestion(name, known, "`dlrnn recipes` lists them")
    )
