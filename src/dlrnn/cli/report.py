"""`dlrnn results` and `dlrnn report`."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlrnn.cli import command, print_json, say, trust_option, warn
from dlrnn.common.untrusted import brief

if TYPE_CHECKING:
    from dlrnn.paper.results import Collected, Results

LENGTHS = Path("docs/measured/lengths.json")


def add(commands: Any) -> None:
    """Add the parsers of both commands."""
    results = commands.add_parser("results", help="recorded results of runs", allow_abbrev=False)
    what = results.add_subparsers(dest="case", required=True, metavar="WHAT")
    adds = command(what, "add", _add, "record runs in a folder of results")
    adds.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="a run directory, or a folder of them"
    )
    adds.add_argument("--into", type=Path, default=Path("results"), metavar="DIR")
    adds.add_argument("--recipe", metavar="NAME", help="default: the nearest recipe")
    text = "how the run differs from its recipe, 'fp32 phases'; default: found from its settings"
    adds.add_argument("--variant", metavar="TEXT", help=text)
    adds.add_argument("--note", default="", metavar="TEXT", help="free text for the record")
    text = "the commit of the source, for runs that did not record it"
    adds.add_argument("--commit", metavar="HASH", help=text)
    text = "also record runs that are not complete"
    adds.add_argument("--unfinished", action="store_true", help=text)
    trust_option(adds)
    text = "replace a recorded run, whatever its steps and settings"
    adds.add_argument("--replace", action="store_true", help=text)

    report = command(commands, "report", _report, "write the results as static pages")
    report.add_argument("--out", type=Path, metavar="DIR", help="default: out/report")
    text = "folders of results: the first is ours, each other becomes a column; default: results"
    report.add_argument("--results", nargs="+", type=Path, metavar="DIR", help=text)
    text = (
        "your run directories, or folders of them: they become a column, or one for each folder"
        " where two runs have the same recipe and seed"
    )
    report.add_argument("--runs", nargs="+", type=Path, default=[], metavar="RUN", help=text)
    trust_option(report)
    text = "write the tables as Markdown, and pictures/table1.png; no pages unless --out is given"
    report.add_argument("--markdown", type=Path, metavar="FILE", help=text)
    text = "write the counts of cells into this page, between its marks (README.md)"
    report.add_argument("--counts", type=Path, metavar="FILE", help=text)
    text = "output of `dlrnn bench lengths --json`; default: docs/measured/lengths.json"
    report.add_argument("--lengths", type=Path, metavar="FILE", help=text)


def _add(given: argparse.Namespace) -> int:
    from dlrnn.paper.recipes import RECIPES
    from dlrnn.paper.results import RECORDS
    from dlrnn.paper.store import add

    names = ("recipe", "variant", "note", "commit", "unfinished", "trust")
    runs, problems = _collected(given.runs, **{name: getattr(given, name) for name in names})
    if not runs:
        raise ValueError(problems[0])
    for problem in problems:
        warn(f"dlrnn results: left out: {problem}")
    for problem in [problem for run in runs.values() for problem in run.problems]:
        warn(f"dlrnn results: {problem}")
    if given.recipe is not None and given.recipe not in RECIPES:
        row = "the tables show it in its own row, without a number of the paper"
        warn(f"dlrnn results: there is no recipe {given.recipe}: {row}")
    said = add(runs.values(), given.into, replace=given.replace)
    if given.json:
        return print_json(said)
    for sentence in said:
        say(sentence)
    say(f"the records are in {given.into / RECORDS}")
    return 0


def _report(given: argparse.Namespace) -> int:
    from dlrnn.common.files import write_whole
    from dlrnn.report.markdown import markdown, with_summary
    from dlrnn.report.picture import table1_png
    from dlrnn.report.site import write_site
    from dlrnn.report.speed import not_shown

    if given.lengths is not None and not given.lengths.is_file():
        raise ValueError(f"there is no file {given.lengths}: see `dlrnn bench lengths --json`")
    results, notes = _all_results(given)
    written, said = [], [problem for one in results for problem in one.problems]
    if given.markdown is not None:
        if given.markdown.is_dir():
            raise ValueError(f"{given.markdown} is a folder; --markdown names a file")
        picture = given.markdown.parent / "pictures" / "table1.png"
        picture.parent.mkdir(parents=True, exist_ok=True)
        write_whole(picture, table1_png(results))
        write_whole(given.markdown, markdown(results).encode(errors="replace"))
        written += [str(given.markdown), str(picture)]
    if given.counts is not None:
        text = given.counts.read_text(encoding="utf-8")
        write_whole(given.counts, with_summary(text, results).encode())
        written.append(str(given.counts))
    if given.out is not None or not written:
        out = given.out or Path("out/report")
        said = write_site(out, results, given.lengths or LENGTHS)
        if given.lengths is None and not LENGTHS.is_file():
            notes.append(not_shown(LENGTHS))
        written.append(str(out / "index.html"))
    for sentence in (*notes, *said):
        warn(f"dlrnn report: {sentence}")
    if given.json:
        return print_json({"written": written, "problems": said})
    for path in written:
        say(f"written: {path}")
    return 0


def _all_results(given: argparse.Namespace) -> tuple[list["Results"], list[str]]:
    """Our results, those of others and the user's runs; and notes that are not problems."""
    from dlrnn.paper.results import check_results, read_results
    from dlrnn.paper.user_runs import user_results

    for folder in given.results or []:
        check_results(folder)
    first, *others = given.results or [Path("results")]
    results = [read_results(first, "ours"), *map(read_results, others, _names(others))]
    if given.runs:
        runs, problems = _collected(given.runs, unfinished=True, trust=given.trust)
        if not runs:
            raise ValueError(problems[0])
        results += user_results(runs, given.runs)
        results[-1].problems += [*problems, *(p for run in runs.values() for p in run.problems)]
    if any(one.records for one in results):
        empty = not results[0].records and not given.results
        return results, [f"nothing is recorded in {first}: ours says “not run”"] if empty else []
    problems = [problem for one in results for problem in one.problems]
    if given.results or problems:  # the user expects something to be shown
        for problem in problems:
            warn(f"dlrnn report: {problem}")
        folders = ", ".join(map(str, given.results or [first]))
        raise ValueError(f"no record in {folders} can be read, so no page is written")
    return results, [f"nothing is recorded in {first}: every number of ours says “not run”"]


def _names(folders: list[Path]) -> list[str]:
    """The names of their columns, with the parent's name where two folders have one name."""
    alone = [each.absolute().name for each in folders]
    parents = [f"{each.absolute().parent.name}/" for each in folders]
    pairs = zip(alone, parents, strict=True)
    names = [name if alone.count(name) == 1 else parent + name for name, parent in pairs]
    for name in names:
        if name in ("ours", "yours"):
            raise ValueError(f"a folder of results cannot be named {name}: rename it")
        if names.count(name) > 1:
            raise ValueError(f"two folders of results are named {name}: rename one")
    return names


def _collected(paths: list[Path], **options: Any) -> tuple[dict[Path, "Collected"], list[str]]:
    """Collect the runs that can be read, by run directory, and a problem for each other run."""
    from dlrnn.paper.collect import collect, find_runs
    from dlrnn.paper.results import UNREADABLE

    found, problems = {}, []
    for path in find_runs(paths):
        try:
            found[path] = collect(path, **options)
        except UNREADABLE as error:
            told = isinstance(error, ValueError | OSError)  # other messages are Python's own
            said = brief(error) if told else "its files are not those of a run directory"
            problems.append(said if str(path) in said else f"{path}: {said}")
    return found, problems
