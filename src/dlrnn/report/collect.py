"""From the folder of a run to records: what was measured, its curve, and what else lies there."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from dlrnn.common.untrusted import MOST_LINES, parse_json, read_bytes
from dlrnn.paper.recipes import as_in_paper
from dlrnn.paper.recipes.outcome import measured
from dlrnn.report.origin import origin_of
from dlrnn.report.records import FULL, Record
from dlrnn.report.results import (
    UNREADABLE,
    Curve,
    check_breakdown,
    read_picture,
    read_snapshots,
)
from dlrnn.train import RunConfig, RunDirectory
from dlrnn.train.early_stopping import constant_level, should_stop, stop_reason
from dlrnn.train.evaluation import best_step
from dlrnn.train.run_directory import CONFIG, ENVIRONMENT, RECORDS, TIMING

EVAL, PICTURE, SNAPSHOTS = "eval-test.json", "eval-test.png", "snapshots.jsonl"
POINTS, STEPS_SHOWN, LAYERS_SHOWN = 200, 16, 48  # of a curve; of snapshots, of all their layers
Item = TypeVar("Item")


@dataclass(frozen=True)
class Collected:
    """Of one run."""

    records: list[Record]
    curve: Curve
    breakdown: dict[str, list[dict[str, Any]]] | None
    picture: bytes | None
    snapshots: list[dict[str, Any]] | None
    problems: list[str] = field(default_factory=list)
    """Of files without which there is still a number, a sentence each."""

    @property
    def stem(self) -> str:
        """Of its files."""
        return self.records[0].stem


def collect(
    path: str | Path,
    *,
    recipe: str | None = None,
    variant: str | None = None,
    note: str = "",
    commit: str | None = None,
    unfinished: bool = False,
) -> Collected:
    """Records of a run, of which recipe it is and how it differs being found out.

    A run that is not complete, or not tested yet, is refused unless `unfinished`: then it is what
    its best validation says, and has as many steps as the last one saw.
    `commit` is for a run that does not know its own.
    """
    folder = RunDirectory.open(path)
    config, result = folder.config, folder.result
    name, origin = origin_of(folder.path, config, recipe)
    lines = folder.records()
    if not lines and result is not None:
        raise ValueError(f"{folder.path / RECORDS} is damaged: it has no record of a complete run")
    if not lines or (result is None and not unfinished):
        done = lines[-1]["step"] if lines else 0
        advice = "--unfinished records it as it is" if done else "it has no record yet"
        raise ValueError(f"{path} is not complete: {done} of {config.steps} steps; {advice}")
    if result is not None and lines[-1]["step"] < result["steps"]:
        told = f"ends at step {lines[-1]['step']}, and the run has {result['steps']}"
        raise ValueError(f"{folder.path / RECORDS} is damaged: it {told}")
    split, metrics = _scores(folder, config, lines, unfinished=unfinished)
    side = _Side(folder.path)
    environment, known = side.read(ENVIRONMENT, _environment) or ({}, None)
    per_step, wall = side.read(TIMING, partial(_seconds, result=result)) or (None, None)
    commit = known or commit
    shared = Record(
        recipe=name,
        variant=origin.variant if variant is None else variant,
        seed=config.seed,
        metric="",
        value=None,
        split=split,
        steps=max(each["step"] for each in lines if split in ("test", each["split"])),
        steps_asked=origin.expected.steps,
        commit=commit,
        hardware=str((result or {}).get("device") or environment.get("device") or "unknown"),
        versions={n: str(environment[n]) for n in ("dlrnn", "python", "torch") if n in environment},
        seconds_per_step=per_step,
        wall_seconds=wall,
        parameters=(result or {}).get("parameters"),
        command=origin.command(config),
        differs=origin.differs,
        note=note,
        scale=origin.size,
    )
    if (result or {}).get("stopped"):
        shared = replace(shared, command=f"{shared.command} --early-stop")
    if shared.is_cut and _same_rate(config, origin.expected, shared.steps):
        told = _plain(next(iter(origin.recipe.paper), ""), lines, shared, config.steps)
        shared = replace(shared, stopped=told)
    records = [
        replace(shared, metric=metric, value=_shown(metric, metrics[metric]))
        for metric in origin.recipe.paper
        if metric in metrics
    ]
    if not records:
        wanted = " / ".join(origin.recipe.paper)
        raise ValueError(f"{path} has no {wanted}, which {name} is judged by")
    step, breakdown = side.read(EVAL, _examined) or (None, None)
    current = step is not None and step == best_step(folder)  # else an older one was examined
    snapshots, broken = side.read(SNAPSHOTS, _snapshots) or (None, [])
    layers = folder.path / SNAPSHOTS
    side.problems.extend(f"{layers}, line {number}, is not a snapshot" for number in broken)
    draws = current and config.make_task().kind == "tagging"
    return Collected(
        records,
        _curve(lines),
        breakdown if current else None,
        side.read(PICTURE, read_picture) if draws else None,
        snapshots,
        side.problems,
    )


def find_runs(paths: Iterable[str | Path]) -> list[Path]:
    """Folders of runs, at or below the paths."""
    found: dict[Path, Path] = {}  # each once, however it is spelt
    for path in map(Path, paths):
        here = sorted(each.parent for each in path.rglob(CONFIG)) if path.is_dir() else []
        if not here:
            why = f"no {CONFIG} at or below it" if path.is_dir() else "it does not exist"
            why = "it is a file, and a run is a folder" if path.is_file() else why
            raise ValueError(f"there is no run in {path}: {why}")
        for run in here:
            found.setdefault(run.resolve(), run)
    return list(found.values())


def thinned(items: Sequence[Item], most: int) -> list[Item]:
    """Evenly chosen, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(k * (len(items) - 1) / (most - 1))] for k in range(most)]


# ---------------------------------------------------------------------------- what lies there


@dataclass(frozen=True)
class _Side:
    """Files of a run without which there is still a number: what cannot be read is a sentence."""

    folder: Path
    problems: list[str] = field(default_factory=list)

    def read(self, name: str, read: Callable[[bytes], Item]) -> Item | None:
        """None if it is not there, or not right."""
        path = self.folder / name
        try:
            return read(read_bytes(path, MOST_LINES)) if path.exists() else None
        except UNREADABLE:
            self.problems.append(f"{path} cannot be read")
            return None


def _environment(content: bytes) -> tuple[dict[str, Any], str | None]:
    """What a run knows of its machine, and its commits."""
    found = _object(content)
    return found, _commits(found)


def _object(content: bytes) -> dict[str, Any]:
    found = parse_json(content, "it", nan=True)
    if not isinstance(found, dict):
        raise TypeError
    return found


def _examined(content: bytes) -> tuple[int, dict[str, list[dict[str, Any]]] | None]:
    """Of which step, and a breakdown of errors if there is one."""
    found = _object(content)
    broken_down = found.get("breakdown")
    return int(found["step"]), check_breakdown(broken_down) if broken_down else None


def _scores(
    folder: RunDirectory, config: RunConfig, lines: list[dict[str, Any]], *, unfinished: bool
) -> tuple[str, dict[str, float]]:
    split, found = measured(folder, config)
    last = {each["split"]: each for each in lines}
    if not found and unfinished:
        split, task = "validation", config.make_task()
        sign = -1 if task.less_is_better else 1
        judged = folder.evaluations(task.metric)
        judged = [each for each in judged if math.isfinite(each[task.metric])] or judged[-1:]
        best = max(judged, key=lambda each: sign * each[task.metric], default={})
        found = {name: value for name, value in best.items() if isinstance(value, float)}
    if not found:
        advice = f"run `dlrnn eval {folder.path}`" if split == "test" else "it has no evaluation"
        raise ValueError(f"{folder.path} was trained and not judged yet: {advice}")
    if "train" in last:
        found = {"train_loss": last["train"]["loss"], **found}
    return split, found


def _same_rate(config: RunConfig, recipe: RunConfig, steps: int) -> bool:
    """So far: one that fell sooner could not have gone on as the recipe would."""
    places = {0, config.warmup, recipe.warmup, steps // 2, steps - 1}
    return all(config.rate(k) == recipe.rate(k) for k in places if 0 <= k < steps)


def _plain(metric: str, lines: list[dict[str, Any]], record: Record, asked: int) -> str:
    """In words, if it may stop where it did: its value is plainly at 0, or at 1; else ""."""
    asked = record.steps_asked if record.scale == FULL else asked
    judged = [(e["step"], e[metric]) for e in lines if e["split"] == "validation" and metric in e]
    level = constant_level(judged, record.steps)
    if level is None or record.steps >= asked or not should_stop(judged, record.steps, asked):
        return ""
    return f"early after {record.steps} of {asked} steps: {stop_reason(metric, level)}"


def _shown(metric: str, value: float) -> float | None:
    value = as_in_paper(metric, value)
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _seconds(content: bytes, result: dict[str, Any] | None) -> tuple[float | None, float | None]:
    """A step (median, so that evaluations do not count), and all of it, however often resumed."""
    sessions: list[list[dict[str, Any]]] = []
    for line in content.decode().splitlines():
        try:
            each = parse_json(line.encode(), "it")
        except ValueError:  # cut by a full disk
            continue
        if not sessions or _is_resumed(sessions[-1][-1], each):
            sessions.append([])
        sessions[-1].append(each)
    steps = [
        (after["seconds"] - before["seconds"]) / (after["step"] - before["step"])
        for session in sessions
        for before, after in pairwise(session)
        if after["step"] > before["step"]
    ]
    whole = [session[-1]["seconds"] for session in sessions]
    if whole and result is not None:
        whole[-1] = max(whole[-1], result["seconds"])
    return (
        float(f"{median(steps):.4g}") if steps else None,
        float(f"{sum(whole):.5g}") if whole else None,
    )


def _is_resumed(last: dict[str, Any], each: dict[str, Any]) -> bool:
    """Whether the run was begun again between two lines of timing.jsonl."""
    return bool(
        each["from"] != last["from"]
        or each["step"] <= last["step"]
        or each["seconds"] < last["seconds"]
    )


def _curve(lines: list[dict[str, Any]]) -> Curve:
    curve: Curve = {}
    for line in lines:
        for name, value in line.items():
            if name not in ("step", "split", "lr") and isinstance(value, int | float):
                points = curve.setdefault(f"{line['split']} {name}", [])
                if math.isfinite(value):
                    points.append((line["step"], as_in_paper(name, value)))
    return {name: thinned(points, POINTS) for name, points in curve.items()}


def _snapshots(content: bytes) -> tuple[list[dict[str, Any]] | None, list[int]]:
    """Some of them, and which lines are broken."""
    lines = content.splitlines(keepends=True)
    if lines and not lines[-1].endswith(b"\n"):  # cut, as the run was
        lines.pop()
    if not lines:
        return None, []
    found, broken = read_snapshots(b"".join(lines))
    most = LAYERS_SHOWN // max(1, len(found[0]["layers"]))
    return thinned(found, max(2, min(STEPS_SHOWN, most))), broken


def _commits(environment: dict[str, Any]) -> str | None:
    """That a run was begun with, and those that it went on with; None if it knows none."""
    every = [each for each in (environment, *environment.get("then", [])) if each.get("git")]
    told = [f"{each['git']}{' with changes' if each.get('changed') else ''}" for each in every]
    return ", then ".join(text for text, _ in groupby(told)) or None
