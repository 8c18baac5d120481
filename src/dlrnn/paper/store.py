"""`dlrnn results add`: add records of runs to a folder of results and keep what is there."""

import dataclasses
import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from dlrnn.common.files import exclusive, require_own_folder, write_whole
from dlrnn.common.untrusted import read_bytes
from dlrnn.paper.collect import Collected
from dlrnn.paper.recipes import RECIPES
from dlrnn.paper.records import Record, parse_record
from dlrnn.paper.results import (
    BREAKDOWNS,
    CURVES,
    PICTURES,
    RECORDS,
    SNAPSHOTS,
    curve_bytes,
    read_lines,
)


def add(collected: Iterable[Collected], folder: str | Path, *, replace: bool = False) -> list[str]:
    """Add runs to a folder and return a sentence on each.

    A run replaces one of the same recipe, variant and seed, with all its metrics, if it has more
    steps and the same settings, if it is the same run (evaluated since; its note stays), or if
    `replace`. Unchanged files are not written again. Lines that cannot be read stay as they are.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for kind in (CURVES, BREAKDOWNS, PICTURES, SNAPSHOTS):
        require_own_folder(folder / kind)
    with exclusive(folder.resolve().parent):  # writing a file locks the folder itself
        return _add(collected, folder, replace=replace)


def _add(collected: Iterable[Collected], folder: Path, *, replace: bool) -> list[str]:
    known: dict[tuple[str, str, int, str], Record] = {}
    unread = []
    for line in filter(bytes.strip, read_lines(folder / RECORDS)):
        try:
            record = parse_record(line.decode(errors="replace"))
            known[record.key] = record
        except ValueError:
            unread.append(line)
    said = []
    owners = {each.run: each for each in known.values()}  # for speed with thousands of records
    stems = [(each.stem, each) for each in owners.values()]
    for run in collected:
        new = run.records[0]
        there = [each for each in known.values() if each.run == new.run]
        steps = max((each.steps for each in there), default=0)
        goes_on = new.steps > steps and all(_goes_on(new, each) for each in there)
        clash = next((r for name, r in stems if name == run.stem and r.run != new.run), None)
        what = f"{run.stem}: {_steps(new)}"
        if problem := _unreadable(run.records):
            said.append(f"{what}, left out: its record {problem}")
            continue
        if clash is not None:
            other = f"{clash.variant or clash.recipe}, seed {clash.seed}"
            why = f"its files would replace those of {other}: give --variant NAME"
            said.append(f"{what}, left out: {why}")
            continue
        if not there:
            said.append(f"{what}, added")
        elif all(dataclasses.replace(each, note=new.note) in run.records for each in there):
            said.append(f"{what}, already there")
        elif replace or goes_on or _is_same(new, there[0]):
            said.append(f"{what}, replaced one with {steps} steps")
            known = {key: each for key, each in known.items() if each.run != new.run}
            _remove_files(run.stem, folder)
        else:
            said.append(f"{what}, {_kept(new, there[0])}")
            continue
        note = new.note or (there[0].note if there and _is_same(new, there[0]) else "")
        known |= {each.key: dataclasses.replace(each, note=note) for each in run.records}
        stems.append((run.stem, new))
        _write_files(run, folder)
    places = {name: place for place, name in enumerate(RECIPES)}
    order = sorted(known.values(), key=lambda one: (places.get(one.recipe, len(places)), *one.run))
    lines = [record.to_line().encode() for record in order] + unread
    _write(folder / RECORDS, b"".join(line + b"\n" for line in lines))
    return said


def _unreadable(records: Iterable[Record]) -> str:
    """Why records could not be read again, such as control characters; "" if they could."""
    try:
        for record in records:
            parse_record(record.to_line())
    except ValueError as error:
        return str(error)
    return ""


def _goes_on(new: Record, there: Record) -> bool:
    """Whether a run is the same experiment with more steps, and tested if the other one is."""
    tested = new.is_untested <= there.is_untested
    return new.settings == there.settings and tested and not new.is_longer


def _kept(new: Record, there: Record) -> str:
    """Why a run is not added, and which option adds it."""
    if new.settings != there.settings:
        had, has = (each.settings or "those of the recipe" for each in (there, new))
        advice = "--variant NAME keeps both, --replace takes this one instead"
        return f"kept the one with other settings ({had}, here {has}); {advice}"
    commit = f" of commit {there.commit[:9]}" if there.commit else ""
    return f"kept the one with {there.steps} steps{commit}; --replace takes this one"


def _steps(record: Record) -> str:
    """The steps of a run, and whether it stopped early."""
    if record.size == "tiny":
        return f"{record.steps} of {record.steps_asked} steps of a tiny run"
    early = ", stopped early" if record.stopped else ""
    return f"{record.steps} of {record.steps_asked} steps{early}"


def _is_same(new: Record, there: Record) -> bool:
    """Whether two records are of one run: no other takes as long to the millisecond."""
    names = ("steps", "command", "hardware", "wall_seconds")
    same = all(getattr(new, name) == getattr(there, name) for name in names)
    return same and new.wall_seconds is not None


def _write_files(run: Collected, folder: Path) -> None:
    _write(folder / CURVES / f"{run.stem}.csv", curve_bytes(run.curve))
    if run.breakdown is not None:
        content = json.dumps(run.breakdown, indent=1) + "\n"
        _write(folder / BREAKDOWNS / f"{run.stem}.json", content.encode())
    if run.picture is not None:
        _write(folder / PICTURES / f"{run.stem}.png", run.picture)
    if run.snapshots is not None:
        lines = [json.dumps(each, separators=(",", ":")) + "\n" for each in run.snapshots]
        _write(folder / SNAPSHOTS / f"{run.stem}.jsonl", "".join(lines).encode())


def _remove_files(stem: str, folder: Path) -> None:
    """Remove the files of a run that is replaced: the new run may have fewer."""
    for kind in (CURVES, BREAKDOWNS, PICTURES, SNAPSHOTS):
        for path in (folder / kind).glob(f"{stem}.*"):
            path.unlink()


def _write(path: Path, content: bytes) -> None:
    with suppress(ValueError, OSError):  # a link or a pipe in its place is replaced
        if read_bytes(path, len(content)) == content:
            return
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, content)
