"""All recipes, by name and by table."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatch

from dlrnn.paper.recipes import table1, table2, table3, table4, table5, table6
from dlrnn.paper.recipes.recipe import Builders, Recipe


class Recipes(Mapping[str, Recipe]):
    """Recipes by name. Each one is built when it is first asked for."""

    def __init__(self, builders: Builders):
        self._builders = builders
        self._built: dict[str, Recipe] = {}

    def __getitem__(self, name: str) -> Recipe:
        """The recipe of that name."""
        if name not in self._built:
            self._built[name] = self._builders[name]()
        return self._built[name]

    def __contains__(self, name: object) -> bool:
        """Whether there is a recipe of that name; builds none."""
        return name in self._builders

    def __iter__(self) -> Iterator[str]:
        return iter(self._builders)

    def __len__(self) -> int:
        return len(self._builders)


_BUILDERS = {
    "table1": table1.BUILDERS,
    "table2": table2.BUILDERS,
    "table3": table3.BUILDERS,
    "table4": table4.BUILDERS,
    "table5": table5.BUILDERS,
    "table6": table6.BUILDERS,
}
TABLES: dict[str, tuple[str, ...]] = {table: tuple(each) for table, each in _BUILDERS.items()}
"""The names of the recipes of each table."""
RECIPES = Recipes({name: build for each in _BUILDERS.values() for name, build in each.items()})
"""Every recipe by its name."""


def get(name: str) -> Recipe:
    """The recipe of that name."""
    if name not in RECIPES:
        if below := _below(name):
            more = f" and {len(below) - 3} more" if len(below) > 3 else ""
            raise ValueError(f"{name} is several recipes: {', '.join(below[:3])}{more}")
        if "*" in name:
            raise ValueError(f"{name!r} is a pattern: `dlrnn sweep` trains several recipes")
        tasks = [each for each in RECIPES if each.split("/")[1] == name]
        how = f"name one of {', '.join(tasks)}" if tasks else advice(name, list(RECIPES))
        raise ValueError(f"there is no recipe {name!r}: {how}")
    return RECIPES[name]


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
    begun = [each for each in known if each.startswith(name.lower())]
    near = begun or get_close_matches(name.lower(), known, n=1)
    return f"did you mean {near[0]!r}?" if near else "`dlrnn recipes` lists them"
