"""The six tables of the paper with their rows, columns and measured numbers."""

from bisect import insort
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, Literal

from dlrnn.paper.comparison import OURS, Cell, Seeds, Table
from dlrnn.paper.numbers import table as published
from dlrnn.paper.recipes import RECIPES, TABLES, table1, table2, table3, table4
from dlrnn.paper.records import FULL, Record
from dlrnn.paper.results import Results

TITLES = {
    "table1": ("table1_atomic", "Atomic tasks"),
    "table2": ("table2_shift_scale", "Shift at growing lengths"),
    "table3": ("table3_higher_order", "ListOps-SubTrees and Pathfinder-Segmentation"),
    "table4": ("table4_classification", "Classification"),
    "table5": ("table5_language_model", "Language model"),
    "table6": ("table6_param_tied", "Attention with DLR's parameters"),
}
"""The names of the tables in paper.json, and our titles."""
PG19 = {"pg19": "PG-19"}


def make_tables(results: Sequence[Results]) -> list[Table]:
    """All six tables; the first results are ours, each of the others has its own columns."""
    return [_table(name, results) for name in TABLES]


def _table(name: str, results: Sequence[Results]) -> Table:
    notes = results[0].notes if results else {}
    cells = {
        each: Cell(each, RECIPES[each].paper, RECIPES[each].note, notes.get(each, ""))
        for each in TABLES[name]
    }
    sources: dict[str, None] = {}
    for place, one in enumerate(results):
        records = [_asked(each) for each in one.records if each.recipe.split("/")[0] == name]
        usual = _usual(records)
        for record in records:
            variant = _told_apart(record, usual[record.recipe, record.variant])
            source = _column(one.name, variant, ours=place == 0)
            if source != OURS:
                sources[source] = None
            empty = Cell(record.recipe, {}, finding=one.notes.get(record.recipe, ""))
            metrics = cells.setdefault(record.recipe, empty).found.setdefault(source, {})
            seeds = metrics.setdefault(record.metric, Seeds(record.metric))
            insort(seeds.records, record, key=attrgetter("seed"))
            seeds.curves[record.seed] = one.curves.get(record.stem, {})
    theirs_first = sorted(sources, key=lambda source: source.startswith(f"{OURS}, "))
    rows, columns = _layout(name, cells)
    paper, title = TITLES[name]
    rows_are: Literal["task", "model"] = "task" if name in ("table1", "table6") else "model"
    caption = published(paper)["caption"]
    return Table(name, title, caption, rows, columns, rows_are, cells, theirs_first)


def _asked(record: Record) -> Record:
    """The record, with the steps of its recipe if they were raised since the run."""
    recipe = RECIPES.get(record.recipe)
    if recipe is None or record.size != FULL or recipe.config.steps <= record.steps_asked:
        return record
    return replace(record, steps_asked=recipe.config.steps)


def _usual(records: Sequence[Record]) -> dict[tuple[str, str], Record]:
    """By recipe and variant, the run that others must be like: tested, as in the recipe."""

    def order_of(each: Record) -> tuple[object, ...]:
        return each.is_untested, each.is_longer, bool(each.settings), each.seed

    order = sorted(records, key=order_of)
    return {(each.recipe, each.variant): each for each in reversed(order)}


def _told_apart(record: Record, usual: Record) -> str:
    """The variant of a record, with whatever forbids a mean of it and the usual run."""
    other = record.settings or "as in the recipe"
    told = [record.variant, other if record.settings != usual.settings else ""]
    told.append("not tested" if record.is_untested != usual.is_untested else "")
    told.append(f"{record.steps} steps" if record.is_longer != usual.is_longer else "")
    return ", ".join(filter(None, told))


def _column(owner: str, variant: str, *, ours: bool) -> str:
    """The title of a column of measured numbers."""
    if ours:
        return f"{OURS}, {variant}" if variant else OURS
    return f"{owner}: {variant}" if variant else owner


def _layout(name: str, cells: dict[str, Cell]) -> tuple[dict[str, str], dict[str, str]]:
    """The titles of the rows and of the columns, by our names."""
    tasks = {cell.task for cell in cells.values()}
    if name in ("table1", "table6"):
        shown = table1.COLUMNS if name == "table1" else table1.COLUMNS_OF_TABLE_6
        rows = {key: title for key, title in table1.TASKS.items() if key in tasks}
        papers = published(TITLES[name][0])["columns"]
        return rows, {key: _model_title(papers[column.place]) for key, column in shown.items()}
    if name == "table2":
        lengths = sorted(int(task) for task in tasks if task.isdecimal())
        lengths = [each for each in lengths if each in published(TITLES[name][0])["lengths"]]
        models = {key: entry[0] for key, entry in table2.MODELS.items()}
        return models, {str(length): f"L {length}" for length in lengths}
    if name == "table5":
        return {each.model: _language_title(each.model) for each in cells.values()}, PG19
    module = table3 if name == "table3" else table4
    return module.MODELS, module.TASKS


def _model_title(column: dict[str, Any]) -> str:
    """The title of a column: `DLR, 6 layers, L 512`."""
    plural = "s" if column["layers"] > 1 else ""
    return f"{column['model']}, {column['layers']} layer{plural}, L {column['L']}"


def _language_title(model: str) -> str:
    """The title of a language model: `DLR, 16 experts, pre-norm`."""
    kind, experts, norm = [*model.split("-"), "", ""][:3]
    title = {"dlr": "DLR", "attention": "Transformer"}.get(kind, kind)
    return f"{title}, {experts} expert{'' if experts == '1' else 's'}, {norm}-norm"
