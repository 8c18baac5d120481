"""The six tables of the paper with their rows, columns and measured numbers."""

from collections.abc import Sequence

from dlrnn.paper.comparison import OURS, Cell, Seeds, Table
from dlrnn.paper.numbers import table as published
from dlrnn.paper.recipes import RECIPES, TABLES, table1, table2, table3, table4, table6
from dlrnn.paper.records import Record
from dlrnn.paper.results import Results


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
        records = [each for each in one.records if each.recipe.split("/")[0] == name]
        usual = _usual(records)
        for record in records:
            variant = _told_apart(record, usual[record.recipe, record.variant])
            source = _column(one.name, variant, ours=place == 0)
            if source != OURS:
                sources[source] = None
            empty = Cell(record.recipe, {}, finding=one.notes.get(record.recipe, ""))
            cell = cells.setdefault(record.recipe, empty)
            metrics = cell.found.setdefault(source, {})
            seeds = metrics.setdefault(record.metric, Seeds(record.metric, []))
            seeds.records.append(record)
            if record.metric == "R2" and (curve := _validated(one, record)):
                seeds.lasts[record.seed] = curve[-1][1]
    for cell in cells.values():
        for by_metric in cell.found.values():
            for seeds in by_metric.values():
                seeds.records.sort(key=lambda record: record.seed)
    theirs_first = sorted(sources, key=lambda source: source.startswith(f"{OURS}, "))
    return LAYOUTS[name](name, cells, theirs_first)


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


def _validated(results: Results, record: Record) -> list[tuple[int, float]]:
    """The curve of R2 if it reaches the last step; else []. Curves leave NaN out."""
    curve = results.curves.get(record.stem, {}).get("validation R2", [])
    return curve if curve and curve[-1][0] == record.steps else []


def _column(owner: str, variant: str, *, ours: bool) -> str:
    """The title of a column of measured numbers."""
    if ours:
        return f"{OURS}, {variant}" if variant else OURS
    return f"{owner}: {variant}" if variant else owner


def _with_layers(name: str, columns: dict[str, table1.Column]) -> dict[str, str]:
    """The titles of columns: `DLR, 6 layers, L 512`."""
    shown = {}
    for key, column in columns.items():
        paper = published(name)["columns"][column.place]
        layers = f"{paper['layers']} layer{'s' if paper['layers'] > 1 else ''}"
        shown[key] = f"{paper['model']}, {layers}, L {paper['L']}"
    return shown


def _atomic(name: str, cells: dict[str, Cell], sources: list[str]) -> Table:
    six = name == "table6"
    paper = "table6_param_tied" if six else "table1_atomic"
    columns = _with_layers(paper, table6.COLUMNS if six else table1.COLUMNS)
    known = {cell.task for cell in cells.values()}
    tasks = {key: title for key, title in table1.TASKS.items() if key in known}
    title = "Attention with DLR's parameters" if six else "Atomic tasks"
    return Table(name, title, published(paper)["caption"], tasks, columns, "task", cells, sources)


def _shift(name: str, cells: dict[str, Cell], sources: list[str]) -> Table:
    lengths = sorted({int(cell.task) for cell in cells.values() if cell.task.isdecimal()})
    columns = {str(length): f"L {length}" for length in lengths}
    models = {key: entry[0] for key, entry in table2.MODELS.items()}
    caption = published("table2_shift_scale")["caption"]
    return Table(name, "Shift, ever longer", caption, models, columns, "model", cells, sources)


def _higher(name: str, cells: dict[str, Cell], sources: list[str]) -> Table:
    columns = {key: column.title for key, column in table3.COLUMNS.items()}
    caption = published("table3_higher_order")["caption"]
    title = "ListOps-SubTrees and Pathfinder-Segmentation"
    return Table(name, title, caption, table3.MODELS, columns, "model", cells, sources)


def _classification(name: str, cells: dict[str, Cell], sources: list[str]) -> Table:
    columns = {key: column.title for key, column in table4.COLUMNS.items()}
    caption = published("table4_classification")["caption"]
    return Table(name, "Classification", caption, table4.MODELS, columns, "model", cells, sources)


def _language(name: str, cells: dict[str, Cell], sources: list[str]) -> Table:
    kinds = {"dlr": "DLR", "attention": "Transformer"}
    rows = {}
    for cell in cells.values():
        kind, experts, norm = [*cell.model.split("-"), "", ""][:3]
        plural = "" if experts == "1" else "s"
        rows[cell.model] = f"{kinds.get(kind, kind)}, {experts} expert{plural}, {norm}-norm"
    caption = published("table5_language_model")["caption"]
    columns = {"pg19": "PG-19"}
    return Table(name, "Language model", caption, rows, columns, "model", cells, sources)


LAYOUTS = {
    "table1": _atomic,
    "table2": _shift,
    "table3": _higher,
    "table4": _classification,
    "table5": _language,
    "table6": _atomic,
}
