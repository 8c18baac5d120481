"""`dlrnn results add`: add records of runs to a folder of results and keep what is there."""

import dataclasses
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from dlrnn.common.files import exclusive, require_own_folder, write_whole
from dlrnn.common.untrusted import read_bytes
from dlrnn.paper.recipes import RECIPES
from dlrnn.paper.records import Record, parse_record, stem
from dlrnn.paper.results import KINDS, MOST_RECORDS, RECORDS, Collected, record_lines

Run = tuple[str, str, int]
"""The recipe, the variant and the seed of a run."""


def add(collected: Iterable[Collected], folder: str | Path, *, replace: bool = False) -> list[str]:
    """Add runs to a folder and return a sentence on each.

    A run replaces one of the same recipe, variant and seed, with all its metrics, if it has more
    steps and the same settings, if it is the same run (evaluated since; its note stays), or if
    `replace`. Unchanged files are not written again. Lines that cannot be read stay as they are.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for kind in KINDS:
        require_own_folder(folder / kind)
    with exclusive(folder.resolve().parent):  # writing a file locks the folder itself
        return _add(collected, folder, replace=replace)


def _add(collected: Iterable[Collected], folder: Path, *, replace: bool) -> list[str]:
    known: dict[Run, dict[str, Record]] = {}
    unread, said = [], []
    for line in _lines(folder / RECORDS):
        try:
            record = parse_record(line.decode(errors="replace"))
            known.setdefault(record.run, {})[record.metric] = record
        except ValueError:
            unread.append(line)
    owners = {stem(*run): run for run in known}
    for run in collected:
        new = run.records[0]
        there = list(known.get(new.run, {}).values())
        steps = max((each.steps for each in there), default=0)
        goes_on = new.steps > steps and all(_goes_on(new, each) for each in there)
        taken = True
        if refusal := _refusal(run, owners.get(run.stem, new.run)):
            taken, verdict = False, f"left out: {refusal}"
        elif not there:
            verdict = "added"
        elif all(dataclasses.replace(each, note=new.note) in run.records for each in there):
            verdict = "already there"
        elif replace or goes_on or _is_same(new, there[0]):
            verdict = f"replaced one with {steps} steps"
            _remove_files(run.stem, folder)
        else:
            taken, verdict = False, _kept(new, there[0])
        said.append(f"{run.stem}: {_steps(new)}, {verdict}")
        if taken:
            note = new.note or (there[0].note if there and _is_same(new, there[0]) else "")
            known[new.run] = {r.metric: dataclasses.replace(r, note=note) for r in run.records}
            owners[run.stem] = new.run
            for kind, content in run.files.items():
                suffix, _, write, _ = KINDS[kind]
                _write(folder / kind / f"{run.stem}.{suffix}", write(content))
    places = {name: place for place, name in enumerate(RECIPES)}
    order = sorted(known, key=lambda run: (places.get(run[0], len(places)), *run))
    lines = [record.to_line().encode() for run in order for record in known[run].values()]
    _write(folder / RECORDS, b"".join(line + b"\n" for line in lines + unread))
    return said


def _lines(path: Path) -> list[bytes]:
    """The lines of records.jsonl that are not empty; [] if there is no file."""
    if not os.path.lexists(path):
        return []
    return list(filter(bytes.strip, record_lines(read_bytes(path, MOST_RECORDS))))


def _refusal(run: Collected, owner: Run) -> str:
    """Why a run cannot be added at all; "" if it can. `owner` is the run that has its files."""
    try:
        for record in run.records:
            parse_record(record.to_line())
    except ValueError as error:  # such as control characters
        return f"its record {error}"
    if owner == run.records[0].run:
        return ""
    recipe, variant, seed = owner
    other = f"{variant or recipe}, seed {seed}"
    return f"its files would replace those of {other}: give --variant NAME"


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
    steps = f"{record.steps} of {record.steps_asked} steps"
    if record.size == "tiny":
        return f"{steps} of a tiny run"
    return f"{steps}, stopped early" if record.stopped else steps


def _is_same(new: Record, there: Record) -> bool:
    """Whether two records are of one run: no other takes as long to the millisecond."""
    names = ("steps", "command", "hardware", "wall_seconds")
    same = all(getattr(new, name) == getattr(there, name) for name in names)
    return same and new.wall_seconds is not None


def _remove_files(stem: str, folder: Path) -> None:
    """Remove the files of a run that is replaced: the new run may have fewer."""
    for kind in KINDS:
        for path in (folder / kind).glob(f"{stem}.*"):
            path.unlink()


def _write(path: Path, content: bytes) -> None:
    with suppress(ValueError, OSError):  # a link or a pipe in its place is replaced
        if read_bytes(path, len(content)) == content:
            return
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, content)
