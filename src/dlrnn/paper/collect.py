"""Collect the records, the curve and the other results of a run from its run directory."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from dlrnn.common.untrusted import MOST_LINES, parse_json, read_bytes
from dlrnn.paper.nearest import nearest_recipe
from dlrnn.paper.numbers import as_in_paper
from dlrnn.paper.records import FULL, Record
from dlrnn.paper.results import (
    UNREADABLE,
    Curve,
    check_breakdown,
    read_picture,
    read_snapshots,
    thinned,
)
from dlrnn.paper.runs import measured
from dlrnn.train import RunConfig, RunDirectory
from dlrnn.train.early_stopping import constant_level, should_stop, stop_reason
from dlrnn.train.evaluation import best_step
from dlrnn.train.run_directory import CONFIG, ENVIRONMENT, RECORDS, TIMING

EVAL, PICTURE, SNAPSHOTS = "eval-test.json", "eval-test.png", "snapshots.jsonl"
POINTS, STEPS_SHOWN, LAYERS_SHOWN = 200, 16, 48  # of a curve; of snapshots, of all their layers
Content = TypeVar("Content")


@dataclass(frozen=True)
class Collected:
    """The results of one run."""

    records: list[Record]
    curve: Curve
    breakdown: dict[str, list[dict[str, Any]]] | None
    picture: bytes | None
    snapshots: list[dict[str, Any]] | None
    problems: list[str] = field(default_factory=list)
    """Problems with files that the numbers do not depend on, a sentence each."""

    @property
    def stem(self) -> str:
        """The name of its files without suffix."""
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
    """Collect the results of a run, and find its nearest recipe unless one is given.

    A run that is not complete or not tested is refused unless `unfinished`: then its best
    validation counts, and its steps are those of the last one. `commit` is for a run that has not
    recorded its own.
    """
    folder = RunDirectory.open(path)
    config, result = folder.config, folder.result
    name, nearest = nearest_recipe(folder.path, config, recipe)
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
    split, metrics = _metrics(folder, config, lines, unfinished=unfinished)
    files = _OtherFiles(folder.path)
    environment, known = files.read(ENVIRONMENT, _environment) or ({}, None)
    per_step, wall = files.read(TIMING, partial(_seconds, result=result)) or (None, None)
    commit = known or commit
    shared = Record(
        recipe=name,
        variant=nearest.variant if variant is None else variant,
        seed=config.seed,
        metric="",
        value=None,
        split=split,
        steps=max(each["step"] for each in lines if split in ("test", each["split"])),
        steps_asked=nearest.expected.steps,
        commit=commit,
        hardware=str((result or {}).get("device") or environment.get("device") or "unknown"),
        versions={n: str(environment[n]) for n in ("dlrnn", "python", "torch") if n in environment},
        seconds_per_step=per_step,
        wall_seconds=wall,
        parameters=(result or {}).get("parameters"),
        command=nearest.command(config),
        differs=nearest.differs,
        note=note,
        scale=nearest.size,
    )
    if (result or {}).get("stopped"):
        shared = replace(shared, command=f"{shared.command} --early-stop")
    if shared.is_cut and _same_rate(config, nearest.expected, shared.steps):
        told = _stopped(next(iter(nearest.recipe.paper), ""), lines, shared, config.steps)
        shared = replace(shared, stopped=told)
    records = [
        replace(shared, metric=metric, value=_shown(metric, metrics[metric]))
        for metric in nearest.recipe.paper
        if metric in metrics
    ]
    if not records:
        expected = " / ".join(nearest.recipe.paper)
        raise ValueError(f"{path} has no {expected}, which the paper reports for {name}")
    step, breakdown = files.read(EVAL, _evaluation) or (None, None)
    current = step is not None and step == best_step(folder)  # not an older checkpoint
    snapshots, broken = files.read(SNAPSHOTS, _snapshots) or (None, [])
    layers = folder.path / SNAPSHOTS
    files.problems.extend(f"{layers}, line {number}, is not a snapshot" for number in broken)
    draws = current and config.make_task().kind == "tagging"
    return Collected(
        records,
        _curve(lines),
        breakdown if current else None,
        files.read(PICTURE, read_picture) if draws else None,
        snapshots,
        files.problems,
    )


def find_runs(paths: Iterable[str | Path]) -> list[Path]:
    """The run directories at or below the paths."""
    found: dict[Path, Path] = {}  # each directory once
    for path in map(Path, paths):
        here = sorted(each.parent for each in path.rglob(CONFIG)) if path.is_dir() else []
        if not here:
            why = f"no {CONFIG} at or below it" if path.is_dir() else "it does not exist"
            why = "it is a file; a run directory was expected" if path.is_file() else why
            raise ValueError(f"there is no run in {path}: {why}")
        for run in here:
            found.setdefault(run.resolve(), run)
    return list(found.values())


# ---------------------------------------------------------------------------- other files


@dataclass(frozen=True)
class _OtherFiles:
    """Files that the numbers do not depend on; those that cannot be read become problems."""

    folder: Path
    problems: list[str] = field(default_factory=list)

    def read(self, name: str, read: Callable[[bytes], Content]) -> Content | None:
        """The parsed content of a file; None if there is none, or it cannot be parsed."""
        path = self.folder / name
        try:
            return read(read_bytes(path, MOST_LINES)) if path.exists() else None
        except UNREADABLE:
            self.problems.append(f"{path} cannot be read")
            return None


def _environment(content: bytes) -> tuple[dict[str, Any], str | None]:
    """The content of environment.json, and the commits in it."""
    found = _object(content)
    return found, _commits(found)


def _object(content: bytes) -> dict[str, Any]:
    found = parse_json(content, "it", nan=True)
    if not isinstance(found, dict):
        raise TypeError
    return found


def _evaluation(content: bytes) -> tuple[int, dict[str, list[dict[str, Any]]] | None]:
    """The step of an evaluation, and its breakdown of errors, if there is one."""
    found = _object(content)
    broken_down = found.get("breakdown")
    return int(found["step"]), check_breakdown(broken_down) if broken_down else None


def _metrics(
    folder: RunDirectory, config: RunConfig, lines: list[dict[str, Any]], *, unfinished: bool
) -> tuple[str, dict[str, float]]:
    """The split and the metrics of a run; of an unfinished one, the best validation."""
    split, found = measured(folder, config)
    last = {each["split"]: each for each in lines}
    if not found and unfinished:
        split, task = "validation", config.make_task()
        sign = -1 if task.less_is_better else 1
        known = folder.evaluations(task.metric)
        known = [each for each in known if math.isfinite(each[task.metric])] or known[-1:]
        best = max(known, key=lambda each: sign * each[task.metric], default={})
        found = {name: value for name, value in best.items() if isinstance(value, float)}
    if not found:
        advice = f"run `dlrnn eval {folder.path}`" if split == "test" else "it has no evaluation"
        raise ValueError(f"{folder.path} was trained and not evaluated yet: {advice}")
    if "train" in last:
        found = {"train_loss": last["train"]["loss"], **found}
    return split, found


def _same_rate(config: RunConfig, recipe: RunConfig, steps: int) -> bool:
    """Whether the learning rate was the recipe's at all steps so far."""
    places = {0, config.warmup, recipe.warmup, steps // 2, steps - 1}
    return all(config.rate(k) == recipe.rate(k) for k in places if 0 <= k < steps)


def _stopped(metric: str, lines: list[dict[str, Any]], record: Record, asked: int) -> str:
    """Why the run may stop early, with its value near 0 or 1, in words; "" if it may not."""
    asked = record.steps_asked if record.scale == FULL else asked
    known = [(e["step"], e[metric]) for e in lines if e["split"] == "validation" and metric in e]
    level = constant_level(known, record.steps)
    if level is None or record.steps >= asked or not should_stop(known, record.steps, asked):
        return ""
    return f"early after {record.steps} of {asked} steps: {stop_reason(metric, level)}"


def _shown(metric: str, value: float) -> float | None:
    value = as_in_paper(metric, value)
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _seconds(content: bytes, result: dict[str, Any] | None) -> tuple[float | None, float | None]:
    """Seconds of a step (the median, to leave out evaluations) and of the run with all resumes."""
    sessions: list[list[dict[str, Any]]] = []
    for line in content.decode().splitlines():
        try:
            each = parse_json(line.encode(), "it")
        except ValueError:  # truncated by a full disk
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
    """Whether the run was resumed between two lines of timing.jsonl."""
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
    """A choice of the snapshots, and the numbers of broken lines."""
    lines = content.splitlines(keepends=True)
    if lines and not lines[-1].endswith(b"\n"):  # truncated: the run was killed
        lines.pop()
    if not lines:
        return None, []
    found, broken = read_snapshots(b"".join(lines))
    most = LAYERS_SHOWN // max(1, len(found[0]["layers"]))
    return thinned(found, max(2, min(STEPS_SHOWN, most))), broken


def _commits(environment: dict[str, Any]) -> str | None:
    """The commits of a run and of its resumes; None if it has recorded none."""
    every = [each for each in (environment, *environment.get("then", [])) if each.get("git")]
    told = [f"{each['git']}{' with changes' if each.get('changed') else ''}" for each in every]
    return ", then ".join(text for text, _ in groupby(told)) or None
