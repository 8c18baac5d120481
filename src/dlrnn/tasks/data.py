"""Data sets on disk by the name of their task: build, import and list them."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dlrnn.common.suggestions import suggestion
from dlrnn.common.untrusted import fit, parse_json, read_bytes
from dlrnn.tasks import listops, pathfinder
from dlrnn.tasks.lra import images_release, listops_release
from dlrnn.tasks.pg19 import books_set
from dlrnn.tasks.speech import speech_set
from dlrnn.tasks.storage import shards
from dlrnn.tasks.storage.build import build_set
from dlrnn.tasks.storage.imports import write_set
from dlrnn.tasks.storage.specs import GeneratedSet, ImportedSet, scaled_counts
from dlrnn.tasks.text import retrieval_set, text_set

GENERATORS: dict[str, Callable[..., GeneratedSet]] = {
    "listops-subtrees": listops.subtrees,
    "listops": listops.lra,
    "pathfinder-segmentation": pathfinder.segmentation,
    "pathfinder": pathfinder.lra,
    "path-x": pathfinder.path_x,
}
"""The tasks whose data sets are generated."""


def build(
    name: str,
    *,
    resolution: int | None = None,
    samples: int | None = None,
    seed: int = 0,
    workers: int | None = None,
    out: str | os.PathLike[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Build a generated data set, by default all samples, on all cores, in `data/NAME`.

    `samples` are divided into splits in the proportions of the whole data set, at least one for
    each. Only pathfinder-segmentation has a `resolution`; its folder is `data/NAME-RESOLUTION`.
    """
    if name not in GENERATORS:
        advice = suggestion(name, GENERATORS, f"there are: {', '.join(GENERATORS)}")
        raise ValueError(f"there is no set {name!r} to build: {advice}")
    settings: dict[str, Any] = {"seed": seed}
    segmentation = name == "pathfinder-segmentation"
    if segmentation:
        settings["resolution"] = resolution or 128
    elif resolution is not None:
        has = "no resolution" if name.startswith("listops") else "one resolution"
        raise ValueError(f"{name} has {has}; only pathfinder-segmentation has several")
    spec = GENERATORS[name](**settings)
    if samples is not None:
        counts = scaled_counts(spec.counts, samples)
        spec = GENERATORS[name](**settings, counts=counts)
    default = f"{name}-{settings['resolution']}" if segmentation else name
    folder = Path("data") / default if out is None else Path(out)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return build_set(spec, folder, workers=workers or cores or 1, progress=progress)


def imported_sets(tokenizer: str | os.PathLike[str] | None = None) -> dict[str, ImportedSet]:
    """Return the data sets that are imported, by the name of their task."""
    images = images_release(pathfinder.lra()), images_release(pathfinder.path_x())
    books = books_set(None if tokenizer is None else Path(tokenizer))
    every = (text_set(), retrieval_set(), listops_release(), *images, speech_set(), books)
    return {each.name: each for each in every}


def import_set(
    name: str,
    path: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    *,
    tokenizer: str | os.PathLike[str] | None = None,
    progress: Callable[[int, int | None], None] | None = None,
) -> Path:
    """Import a task's data set from a folder, an archive or a file, by default to `data/NAME`."""
    sets = imported_sets(tokenizer)
    if name not in sets:
        advice = suggestion(name, sets, f"there are: {', '.join(sets)}")
        raise ValueError(f"there is no set {name!r} to import: {advice}")
    if tokenizer is not None and sets[name].tokenizer is None:
        raise ValueError(f"{name} takes no tokenizer")
    folder = Path("data") / name if out is None else out
    return write_set(sets[name], path, folder, progress=progress)


def list_sets(root: str | os.PathLike[str] = "data") -> list[dict[str, Any]]:
    """Return a row for each data set below a folder, complete or not."""
    rows = []
    for path in sorted(Path(root).rglob("*.json*")):
        is_manifest = path.name == shards.MANIFEST
        begun = path.name == shards.PROGRESS and not (path.parent / shards.MANIFEST).exists()
        if not (is_manifest or begun):
            continue
        try:
            content = read_bytes(path, links=True)
            first = content if is_manifest else content.partition(b"\n")[0]
            header = fit(parse_json(first, "it"), dict[str, Any], "it")
            row = {
                "folder": str(path.parent),
                "task": fit(header["task"], str, "task"),
                "samples": sum(fit(header["counts"], dict[str, int], "counts").values()),
                "seed": fit(header["seed"], int, "seed"),
            }
        except (ValueError, KeyError, OSError):
            continue  # another program's file
        try:
            shards.load_manifest(path.parent)
            state = "built"
        except ValueError:
            state = "damaged" if is_manifest else "not finished"
        rows.append({**row, "state": state})
    return rows
