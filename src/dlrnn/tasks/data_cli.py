"""What `dlrnn data build`, `import`, `fetch` ... do; `dlrnn.cli` parses and prints errors."""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from dlrnn.common.untrusted import fit, parse_json, read_bytes
from dlrnn.tasks import listops, nearest, pathfinder, shards
from dlrnn.tasks.build import build_set
from dlrnn.tasks.fetch import download
from dlrnn.tasks.imports import import_set

SETS: dict[str, Callable[..., shards.Spec]] = {
    "listops-subtrees": listops.subtrees,
    "listops": listops.lra,
    "pathfinder-segmentation": pathfinder.segmentation,
    "pathfinder": pathfinder.lra,
    "path-x": pathfinder.path_x,
}
"""Sets that can be built, by the name of their task."""

SECONDS_A_LINE = 10


def build(
    name: str,
    *,
    resolution: int | None = None,
    samples: int | None = None,
    seed: int = 0,
    workers: int | None = None,
    out: str | os.PathLike[str] | None = None,
) -> Path:
    """Build a set with a progress bar; by default all of it, on all cores, in `data/NAME`.

    `samples` are divided into splits as the whole set is, at least one for each. `resolution`
    belongs to pathfinder-segmentation, whose folder is then `data/NAME-RESOLUTION`.
    """
    if name not in SETS:
        raise ValueError(f"there is no set {name!r} to build{nearest(name, list(SETS))}")
    settings: dict[str, Any] = {"seed": seed}
    segmentation = name == "pathfinder-segmentation"
    if segmentation:
        settings["resolution"] = resolution or 128
    elif resolution is not None:
        has = "no resolution" if name.startswith("listops") else "one resolution"
        raise ValueError(f"{name} has {has}; only pathfinder-segmentation has several")
    spec = SETS[name](**settings)
    if samples is not None:
        spec = SETS[name](**settings, counts=shards.scaled_counts(spec.counts, samples))
    default = f"{name}-{settings['resolution']}" if segmentation else name
    folder = Path("data") / default if out is None else Path(out)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    with _bar(name, "samples") as progress:
        return build_set(spec, folder, workers=workers or cores or 1, progress=progress)


def import_(
    name: str,
    path: str | os.PathLike[str],
    *,
    tokenizer: str | os.PathLike[str] | None = None,
    out: str | os.PathLike[str] | None = None,
) -> Path:
    """Import what the user has, with a progress bar; by default into `data/NAME`."""
    folder = Path("data") / name if out is None else out
    with _bar(name, "samples") as progress:
        return import_set(name, path, folder, tokenizer=tokenizer, progress=progress)


def fetch(
    name: str,
    *,
    tokenizer: str | os.PathLike[str] | None = None,
    out: str | os.PathLike[str] | None = None,
) -> Path:
    """Download the official release and import it."""
    return import_(name, download(name), tokenizer=tokenizer, out=out)


def verify(folder: str | os.PathLike[str]) -> list[str]:
    """Check every hash and count with a progress bar; one sentence a problem."""
    with _bar("verify", "shards") as progress:
        return shards.verify(folder, progress=progress)


@contextlib.contextmanager
def _bar(name: str, things: str) -> Iterator[Callable[[int, int | None], None]]:
    """A bar on stderr that starts when there is progress: before, a refusal is one sentence. In a
    pipe or a file, a line now and then.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines(name, things)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=console)
    task = bar.add_task(name, total=None, rate="")

    def progress(done: int, total: int | None) -> None:
        bar.start()
        speed = bar.tasks[0].speed
        rate = f"{speed:.3g} {things}/s" if speed else ""
        bar.update(task, completed=done, total=total, rate=rate)

    try:
        yield progress
    finally:
        if bar.live.is_started:
            bar.stop()


def _lines(name: str, things: str) -> Callable[[int, int | None], None]:
    last = time.monotonic()

    def progress(done: int, total: int | None) -> None:
        nonlocal last
        if time.monotonic() - last > SECONDS_A_LINE:
            last = time.monotonic()
            of = "" if total is None else f" of {total}"
            print(f"{name}: {done}{of} {things}", file=sys.stderr)

    return progress


def found(root: str | os.PathLike[str] = "data") -> list[dict[str, Any]]:
    """A row for each set under a folder, whole or begun."""
    rows = []
    for path in sorted(Path(root).rglob("*.json*")):
        if path.name not in (shards.MANIFEST, shards.PROGRESS):
            continue
        if path.name == shards.PROGRESS and (path.parent / shards.MANIFEST).exists():
            continue
        try:
            content = read_bytes(path, links=True)
            if path.name == shards.PROGRESS:
                content = content.partition(b"\n")[0]
            header = fit(parse_json(content, "it"), dict[str, Any], "it")
            row = {
                "folder": str(path.parent),
                "task": fit(header["task"], str, "task"),
                "samples": sum(fit(header["counts"], dict[str, int], "counts").values()),
                "seed": fit(header["seed"], int, "seed"),
                "state": _state(path),
            }
        except (ValueError, KeyError, OSError):
            continue  # not one of ours
        rows.append(row)
    return rows


def _state(path: Path) -> str:
    if path.name != shards.MANIFEST:
        return "not finished"
    try:
        shards.load_manifest(path.parent)
    except ValueError:
        return "damaged"
    return "built"
