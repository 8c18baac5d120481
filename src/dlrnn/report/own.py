"""The user's own runs: a column, or one a folder where two runs are of one recipe and seed."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from dlrnn.report.collect import Collected
from dlrnn.report.results import Results
from dlrnn.report.store import in_memory

YOURS = "yours"


def own_results(runs: Mapping[Path, Collected], given: Sequence[Path]) -> list[Results]:
    """Every run is shown: those that would hide one another have columns by folder, "yours, A".

    Of `given`, folders or folders of runs, those are told apart that share a recipe and seed; then
    the runs inside one of them that do.
    """
    under = {path: next(one for one in given if one in (path, *path.parents)) for path in runs}
    columns = dict.fromkeys(runs, YOURS)
    groups = [{under[path] for path in group} for group in _alike(runs, columns)]
    names = _apart({folder for group in groups if len(group) > 1 for folder in group})
    for path, folder in under.items():
        columns[path] += f", {names[folder]}" if folder in names else ""
    for group in _alike(runs, columns):
        for path, name in _apart(group).items():
            columns[path] += f", {name}"
    return [
        in_memory((runs[path] for path, here in columns.items() if here == column), column)
        for column in dict.fromkeys(columns.values())
    ]


def _alike(runs: Mapping[Path, Collected], columns: Mapping[Path, str]) -> list[list[Path]]:
    """Runs of one recipe, variant and seed in one column, two or more."""
    found: dict[tuple[object, ...], list[Path]] = {}
    for path, run in runs.items():
        found.setdefault((columns[path], *run.records[0].run), []).append(path)
    return [group for group in found.values() if len(group) > 1]


def _apart(paths: Iterable[Path]) -> dict[Path, str]:
    """Each by the part of its path that the others do not have: "A" of A/shift and B/shift."""
    parts = {path: path.resolve().parts for path in sorted(paths)}
    most = min(map(len, parts.values()), default=1) - 1  # something must be left
    first = _same(zip(*parts.values(), strict=False), most)
    last = _same(zip(*(reversed(each) for each in parts.values()), strict=False), most - first)
    return {path: "/".join(each[first : len(each) - last]) for path, each in parts.items()}


def _same(places: Iterable[tuple[str, ...]], most: int) -> int:
    """At how many places, from the first, all have the same."""
    count = 0
    for place in places:
        if count == most or len(set(place)) > 1:
            break
        count += 1
    return count
