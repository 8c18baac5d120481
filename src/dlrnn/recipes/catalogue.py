"""All recipes, by table and by name."""

from difflib import get_close_matches

from dlrnn.recipes import table1, table2, table3, table4, table5, table6
from dlrnn.recipes.recipe import Recipe

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
        if below := [each for each in RECIPES if each.startswith(f"{name.rstrip('/')}/")]:
            more = f" and {len(below) - 3} more" if len(below) > 3 else ""
            raise ValueError(f"{name} is several recipes: {', '.join(below[:3])}{more}")
        if "*" in name:
            raise ValueError(f"{name!r} is a pattern: `dlrnn sweep` trains several recipes")
        near = get_close_matches(name.lower(), list(RECIPES), n=1, cutoff=0)
        raise ValueError(f"there is no recipe {name!r}: did you mean {near[0]!r}?")
    return RECIPES[name]
