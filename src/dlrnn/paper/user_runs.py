"""Columns of the user's runs: one for all, or one for each folder where two runs are alike."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from dlrnn.paper.results import Collected, Results

YOURS = "yours"


def user_results(runs: Mapping[Path, Collected], given: Sequence[Path]) -> list[Results]:
    """Results of the user's runs, one for each column; runs that are alike get columns by folder.

    Two runs are alike if they have the same recipe, variant and seed. First the folders in `given`
    that hold such runs get their own columns ("yours, A"), then the runs inside one folder.
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
    """Groups of two or more runs of one recipe, variant and seed in one column."""
    found: dict[tuple[object, ...], list[Path]] = {}
    for path, run in runs.items():
        found.setdefault((columns[path], *run.records[0].run), []).append(path)
    return [group for group in found.values() if len(group) > 1]


def _apart(paths: Iterable[Path]) -> dict[Path, str]:
    """Name each path by the part that differs from the others: "A" for A/shift and B/shift."""
    parts = {path: path.resolve().parts for path in sorted(paths)}
    most = min(map(len, parts.values()), default=1) - 1  # something must be left
    first = _same(zip(*parts.values(), strict=False), most)
    last = _same(zip(*(reversed(each) for each in parts.values()), strict=False), most - first)
    return {path: "/".join(each[first : len(each) - last]) for path, each in parts.items()}


def _same(places: Iterable[tuple[str, ...]], most: int) -> int:
    """The number of places, from the first, at which all are equal."""
    count = 0
    for place in places:
        if count == most or len(set(place)) > 1:
            break
        count += 1
    return count


def in_memory(collected: Iterable[Collected], name: str) -> Results:
    """Results in memory; of two runs of one recipe, variant and seed, the longer one."""
    found = Results(name)
    kept: dict[tuple[str, str, int], Collected] = {}
    for run in collected:
        new = run.records[0]
        if new.run not in kept or new.steps > kept[new.run].records[0].steps:
            kept[new.run] = run
    for run in kept.values():
        found.records += run.records
        for kind, content in run.files.items():
            found.add_file(kind, run.stem, content)
    return found
