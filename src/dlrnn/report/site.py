"""The static site: pages, style, scripts, pictures and layers; it needs no network."""

from collections.abc import Sequence
from contextlib import suppress
from importlib.resources import files
from pathlib import Path

from dlrnn.common.files import write_whole
from dlrnn.common.untrusted import open_regular
from dlrnn.paper.results import Results
from dlrnn.paper.tables import make_tables
from dlrnn.report import pages
from dlrnn.report.explorer import explorer_runs, fitted, left_out
from dlrnn.report.speed import read_lengths, speed
from dlrnn.report.table_page import table_page
from dlrnn.report.templates import render

LIMIT = 8_000_000
"""The most bytes of a site; layers that do not fit are left out, and the explorer says so."""

ASSETS = ("report.css", "report.js", "explorer.js")


def write_site(out: str | Path, results: Sequence[Results], lengths: str | Path) -> list[str]:
    """Write every page; the first results are ours. Return a sentence on each problem."""
    out = Path(out)
    said = [problem for one in results for problem in one.problems]
    measured = read_lengths(lengths, said)
    tables = make_tables(results)
    drawn = {table.name: table_page(table, said, results[0].step_times) for table in tables}
    drawn["index"] = pages.overview(tables, measured, said)
    drawn["speed"] = speed(tables, results[0], measured, lengths, said)
    drawn["listops"] = pages.listops(results, tables, said)
    content = {name: files("dlrnn.report").joinpath("assets", name).read_bytes() for name in ASSETS}
    images = {}
    for place, (title, record, one) in enumerate(pages.runs_with("pictures", results, tables)):
        name = f"{place}-{record.stem}.png"
        images[name] = title
        content[f"pictures/{name}"] = one.pictures[record.stem]
    drawn["pathfinder"] = render("pathfinder", page="pathfinder", problems=said, images=images)
    used = sum(len(page) for page in drawn.values()) + sum(map(len, content.values()))
    runs = explorer_runs(results, tables)
    kept, steps = fitted(runs, int(0.96 * LIMIT) - used)  # the rest is for the explorer's page
    content |= {f"layers/{run.key}.js": run.script(steps) for run in kept}
    drawn["explorer"] = render(
        "explorer", page="explorer", problems=said, runs=kept, missing=left_out(runs, kept)
    )
    content |= {f"{name}.html": text.encode(errors="replace") for name, text in drawn.items()}
    for name, data in content.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        write_whole(out / name, data)
    for path in (out / "layers").glob("*.js"):  # of an older site in this folder
        if f"layers/{path.name}" not in content and _is_layers(path):
            path.unlink()
    size = sum(map(len, content.values()))
    if size > LIMIT:
        said.append(f"the site has {size / 1e6:.1f} MB, more than {LIMIT / 1e6:.0f}")
    return said


def _is_layers(path: Path) -> bool:
    """Whether a file is a script of layers that dlrnn wrote."""
    with suppress(ValueError, OSError), open_regular(path) as file:
        return file.read(11) == b"dlrnnLayers"
    return False
