"""The static site: pages, style, script, pictures, layers; opens from disk, asks no network."""

from collections.abc import Sequence
from contextlib import suppress
from importlib.resources import files
from pathlib import Path

from dlrnn.common.files import write_whole
from dlrnn.common.untrusted import open_regular, printable
from dlrnn.paper.results import Results
from dlrnn.paper.tables import make_tables
from dlrnn.report import pages
from dlrnn.report.explorer import explorer, explorer_runs, fitted, left_out
from dlrnn.report.html import Html, join, tag
from dlrnn.report.speed import read_lengths, speed
from dlrnn.report.tables import table_page

LIMIT = 8_000_000
"""Bytes of all of it; layers of the explorer that would not fit are left out, and it says so."""

MOST_PROBLEMS = 200
"""Sentences on a page of what could not be read."""

ASSETS = ("report.css", "report.js", "explorer.js")
REST = {
    "speed": "Speed",
    "listops": "ListOps",
    "pathfinder": "Pathfinder",
    "explorer": "Explorer",
}


def write_site(out: str | Path, results: Sequence[Results], lengths: str | Path) -> list[str]:
    """Write every page; the first results are ours. All that could not be read, a sentence each."""
    out = Path(out)
    said = [problem for one in results for problem in one.problems]
    measured = read_lengths(lengths, said)
    tables = make_tables(results)
    drawn = {f"{table.name}.html": table_page(table, results) for table in tables}
    drawn["index.html"] = pages.overview(tables, measured)
    drawn["speed.html"] = speed(tables, results[0], measured, lengths)
    drawn["listops.html"] = pages.listops(results, tables)
    drawn["pathfinder.html"] = pages.pathfinder(results, tables)
    content = {f"pictures/{name}": data for name, data in pages.pictures(results, tables).items()}
    content |= {name: _asset(name) for name in ASSETS}
    used = sum(len(page) for page in drawn.values()) + sum(map(len, content.values()))
    runs = explorer_runs(results, tables)
    kept, steps = fitted(runs, int(0.95 * LIMIT) - used)
    content |= {f"layers/{run.key}.js": run.script(steps) for run in kept}
    missing = left_out(runs, kept)
    drawn["explorer.html"] = explorer({run.key: run.name for run in kept}, missing)
    for name, main in drawn.items():
        content[name] = _page(name, main, said).encode(errors="replace")
    for name, data in content.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        write_whole(out / name, data)
    for path in (out / "layers").glob("*.js"):  # of a site that was here before
        if f"layers/{path.name}" not in content and _is_layers(path):
            path.unlink()
    size = sum(map(len, content.values()))
    if size > LIMIT:
        said.append(f"the site has {size / 1e6:.1f} MB, more than {LIMIT / 1e6:.0f}")
    return said


def _is_layers(path: Path) -> bool:
    """Whether we wrote it."""
    with suppress(ValueError, OSError), open_regular(path) as file:
        return file.read(11) == b"dlrnnLayers"
    return False


def _asset(name: str) -> bytes:
    return files("dlrnn.report").joinpath("assets", name).read_bytes()


def _page(name: str, main: Html, problems: Sequence[str]) -> str:
    """Around the content of a page: head, skip link, navigation, what could not be read."""
    heading = main.partition("<h1>")[2].partition("</h1>")[0]
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("link", rel="icon", href="data:,"),
        tag("title", Html(heading), " – dlrnn"),
        tag("link", rel="stylesheet", href="report.css"),
        tag("script", src="report.js", defer=True),
    )
    body = tag(
        "body",
        tag("a", "Skip to the content", href="#main", class_="skip"),
        tag("header", tag("a", "dlrnn", href="index.html", class_="brand"), _navigation(name)),
        tag("main", _problems(problems), main, id="main", tabindex=-1),
        tag("footer", tag("p", "Written by ", tag("code", "dlrnn report"),
                          " from recorded results; findings and notes are written by hand.")),
    )  # fmt: skip
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def _navigation(here: str) -> Html:
    tables = {f"table{k}": f"Table {k}" for k in range(1, 7)}
    links = {"index": "Overview", **tables, **REST}
    items = [
        tag(
            "li",
            tag("a", text, href=f"{key}.html",
                aria_current="page" if here == f"{key}.html" else None),
        )
        for key, text in links.items()
    ]  # fmt: skip
    return tag("nav", tag("ul", items), aria_label="Pages")


def _problems(problems: Sequence[str]) -> Html | None:
    if not problems:
        return None
    count = len(problems)
    said = f"{count} thing{'s' if count > 1 else ''} could not be read; the rest is shown"
    shown = [printable(problem) for problem in problems[:MOST_PROBLEMS]]
    shown += [f"and {count - MOST_PROBLEMS} more"] if count > MOST_PROBLEMS else []
    sentences = tag("ul", [tag("li", problem) for problem in shown])
    return join(tag("details", tag("summary", said), sentences, class_="problems", open=count < 4))
