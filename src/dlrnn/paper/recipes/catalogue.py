"""All recipes, by table and by name."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatch

from dlrnn.paper.recipes import table1, table2, table3, table4, table5, table6
from dlrnn.paper.recipes.recipe import Recipe

TABLES = {
    "table1": table1.RECIPES,
    "table2": table2.RECIPES,
    "table3": table3.RECIPES,
    "table4": table4.RECIPES,
    "table5": table5.RECIPES,
    "table6": table6.RECIPES,
}
RECIPES: dict[str, Recipe] = {each.name: each for table in TABLES.values() for each in table}
"""Every recipe by its name."""


def get(name: str) -> Recipe:
    """The recipe of that name."""
    if name not in RECIPES:
        if below := _below(name):
            more = f" and {len(below) - 3} more" if len(below) > 3 else ""
            raise ValueError(f"{name} is several recipes: {', '.join(below[:3])}{more}")
        if "*" in name:
            raise ValueError(f"{name!r} is a pattern: `dlrnn sweep` trains several recipes")
        raise ValueError(f"there is no recipe {name!r}: {advice(name, list(RECIPES))}")
    return RECIPES[name]


def chosen(asked: Iterable[str]) -> list[Recipe]:
    """By name, by what names begin with (`table1`, `table1/shift`) or pattern, each once."""
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
    """All names, and their patterns with a star for one part or two."""
    known: dict[str, None] = {}
    for name in RECIPES:
        table, task, model = name.split("/")
        ways = (f"{table}/*", f"{table}/{task}/*", f"{table}/*/{model}", f"*/{task}/*")
        known |= dict.fromkeys((*ways, f"*/{model}", name))
    return list(known)


def advice(name: str, known: Sequence[str]) -> str:
    """The first name that begins so, or the nearest; where none is near, how to see them all."""
    begun = [each for each in known if each.startswith(name.lower())]
    near = begun or get_close_matches(name.lower(), known, n=1)
    return f"did you mean {near[0]!r}?" if near else "`dlrnn recipes` lists them"
