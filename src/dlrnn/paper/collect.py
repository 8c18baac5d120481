"""Collect the records, the curve and the other results of a run from its run directory."""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path
from statistics import median
from typing import Any

from dlrnn.common.untrusted import MOST_LINES, parse_json
from dlrnn.paper.nearest import nearest_recipe
from dlrnn.paper.numbers import as_in_paper
from dlrnn.paper.own_tasks import own_task
from dlrnn.paper.records import FULL, Record
from dlrnn.paper.results import (
    Collected,
    Content,
    Curve,
    broken_lines,
    check_breakdown,
    read_file,
    read_picture,
    read_snapshots,
    thinned,
)
from dlrnn.paper.runs import measured
from dlrnn.tasks import Task, is_built_in
from dlrnn.train import RunConfig, RunDirectory
from dlrnn.train.checkpoint import trusted_task
from dlrnn.train.early_stopping import constant_level, should_stop, stop_reason
from dlrnn.train.evaluation import best_step
from dlrnn.train.run_directory import CONFIG, ENVIRONMENT, RECORDS, TIMING

EVAL, PICTURE, SNAPSHOTS = "eval-test.json", "eval-test.png", "snapshots.jsonl"
POINTS, STEPS_SHOWN, LAYERS_SHOWN = 200, 16, 48  # of a curve; of snapshots, of all their layers


def collect(
    path: str | Path,
    *,
    recipe: str | None = None,
    variant: str | None = None,
    note: str = "",
    commit: str | None = None,
    unfinished: bool = False,
    trust: bool = False,
) -> Collected:
    """Collect the results of a run, and find its nearest recipe unless one is given.

    A run on a task outside of dlrnn is its own recipe, and its task is imported only with `trust`.

    A run that is not complete or not tested is refused unless `unfinished`: then its best
    validation counts, and its steps are those of the last one. `commit` is for a run that has not
    recorded its own.
    """
    folder = RunDirectory.open(path)
    config, result = folder.config, folder.result or {}
    task = trusted_task(config, folder.path / CONFIG, trust=trust)
    if is_built_in(config.task.name):
        name, nearest = nearest_recipe(folder.path, config, recipe)
    else:
        name, nearest = own_task(config, task, recipe)
    lines = folder.records()
    _check_complete(folder, lines, config.steps, unfinished=unfinished)
    split, metrics = measured(folder, task, unfinished=unfinished)
    if not metrics:
        advice = f"run `dlrnn eval {folder.path}`" if split == "test" else "it has no evaluation"
        raise ValueError(f"{folder.path} was trained and not evaluated yet: {advice}")
    problems: list[str] = []
    environment, known = _read(folder, ENVIRONMENT, _environment, problems) or ({}, None)
    times = _read(folder, TIMING, partial(_seconds, result=result), problems)
    per_step, wall = times or (None, None)
    shared = Record(
        recipe=name,
        variant=nearest.variant if variant is None else variant,
        seed=config.seed,
        metric="",
        value=None,
        split=split,
        steps=max(each["step"] for each in lines if split in ("test", each["split"])),
        steps_asked=nearest.expected.steps,
        commit=known or commit,
        hardware=str(result.get("device") or environment.get("device") or "unknown"),
        versions={n: str(environment[n]) for n in ("dlrnn", "python", "torch") if n in environment},
        seconds_per_step=per_step,
        wall_seconds=wall,
        parameters=result.get("parameters"),
        command=f"{nearest.command} --early-stop" if result.get("stopped") else nearest.command,
        differs=nearest.differs,
        note=note,
        scale=nearest.size,
    )
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
    return Collected(records, {"curves": _curve(lines)} | _files(folder, task, problems), problems)


def _check_complete(
    folder: RunDirectory, lines: list[dict[str, Any]], steps: int, *, unfinished: bool
) -> None:
    """Refuse a run that is not complete, or whose records end before it does."""
    done = lines[-1]["step"] if lines else 0
    if folder.result is not None:
        damaged = f"{folder.path / RECORDS} is damaged: it"
        if not lines:
            raise ValueError(f"{damaged} has no record of a complete run")
        if done < (trained := folder.result["steps"]):
            raise ValueError(f"{damaged} ends at step {done}, and the run has {trained}")
    elif not lines or not unfinished:
        advice = "--unfinished records it as it is" if done else "it has no record yet"
        raise ValueError(f"{folder.path} is not complete: {done} of {steps} steps; {advice}")


def _read(
    folder: RunDirectory, name: str, read: Callable[[bytes], Content], problems: list[str]
) -> Content | None:
    """The parsed content of a file that the numbers do not depend on."""
    return read_file(folder.path / name, read, problems, MOST_LINES)


def _files(folder: RunDirectory, task: Task, problems: list[str]) -> dict[str, Any]:
    """The breakdown, the picture and the snapshots of a run, those that it has."""
    found: dict[str, Any] = {}
    step, breakdown = _read(folder, EVAL, _evaluation, problems) or (None, None)
    if step is not None and step == best_step(folder):  # not an older checkpoint
        found["breakdowns"] = breakdown
        if task.kind == "tagging":
            found["pictures"] = _read(folder, PICTURE, read_picture, problems)
    found["snapshots"], broken = _read(folder, SNAPSHOTS, _snapshots, problems) or ([], [])
    problems += broken_lines(folder.path / SNAPSHOTS, broken)
    return {kind: content for kind, content in found.items() if content}


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


def _environment(content: bytes) -> tuple[dict[str, Any], str | None]:
    """The content of environment.json, and the commits of the run and of its resumes in it."""
    found = _object(content)
    every = [each for each in (found, *found.get("then", [])) if each.get("git")]
    told = [f"{each['git']}{' with changes' if each.get('changed') else ''}" for each in every]
    return found, ", then ".join(text for text, _ in groupby(told)) or None


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


def _seconds(content: bytes, result: dict[str, Any]) -> tuple[float | None, float | None]:
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
    if whole:
        whole[-1] = max(whole[-1], result.get("seconds", 0.0))
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


def _snapshots(content: bytes) -> tuple[list[dict[str, Any]], list[int]]:
    """A choice of the snapshots, and the numbers of broken lines."""
    if not content.endswith(b"\n"):  # truncated: the run was killed
        content = content[: content.rfind(b"\n") + 1]
    if not content:
        return [], []
    found, broken = read_snapshots(content)
    most = LAYERS_SHOWN // max(1, len(found[0]["layers"]))
    return thinned(found, max(2, min(STEPS_SHOWN, most))), broken
