"""Runs and sets to damage, and the damage: other values in JSON, links, pipes."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dlrnn.cli import main
from dlrnn.paper.recipes import get, scaled

EVERYTHING = os.environ.get("DLRNN_FAULTS") == "all"

# ---------------------------------------------------------------------------------- runs

RECIPE = "table1/shift/dlr-1"
TABLES = ("recipes", "reproduce", "sweep")  # commands that look for runs by their recipe
OLDER, NEWEST = "step-000000004.safetensors", "step-000000006.safetensors"
SMALL = [
    *("--scale", "tiny", "--steps", "6", "--batch_size", "2", "--eval_batches", "1"),
    *("--log_every", "1", "--eval_every", "2", "--checkpoint_every", "2"),
    *("--model.d_model", "8", "--model.mixer_options.d_state", "8"),
    *("--task.settings.length", "32"),
]
WHERE = ["--writer", "none", "--device", "cpu"]


def make_run(path: Path, *arguments: str) -> Path:
    """Train a run of 6 steps in `path`; its checkpoints are OLDER and NEWEST."""
    assert main(["train", RECIPE, *SMALL, "--out", str(path), *WHERE, "--json", *arguments]) == 0
    return path


def run_below(base: Path, command: str) -> Path:
    """Where `command_line` looks for the run."""
    return base / "runs" / "tiny" / RECIPE / "seed-0" if command in TABLES else base / "run"


def command_line(command: str, base: Path) -> list[object]:
    """The arguments of a command that reads the run below `base`; it may write to `base`/out."""
    run, out = run_below(base, command), base / "out"
    table = ["--scale", "tiny", "--out", base / "runs"]
    return {
        "eval": ["eval", run, "--device", "cpu"],
        "export": ["export", run, out],
        "generate": ["generate", run, "--prompt", "w1", "--tokens", "2", "--device", "cpu"],
        "resume": ["train", "--resume", run, *WHERE],
        "report": ["report", "--runs", run, "--out", out],
        "results": ["results", "add", run, "--into", out],
        "recipes": ["recipes", RECIPE, *table],
        "reproduce": ["reproduce", "table1", "--only", "shift/dlr-1", *table, "--device", "cpu"],
        "sweep": ["sweep", RECIPE, *table, "--device", "cpu"],
    }[command]


def as_recipe(run: Path) -> None:
    """Make a run look like a complete one of the recipe at its tiny scale."""
    config = scaled(get(RECIPE), "tiny")
    (run / "config.json").write_text(config.to_json())
    for name in ("steps", "best_step"):
        edit(run / "result.json", name, config.steps)
    records = (run / "records.jsonl").read_text().splitlines()[:-1]
    last = {"step": config.steps, "split": "validation", "R2": 0.5, "loss": 0.1}
    (run / "records.jsonl").write_text("\n".join([*records, json.dumps(last)]) + "\n")


def stop(run: Path) -> Path:
    """Make a complete run one that was stopped at step 4."""
    (run / "result.json").unlink(missing_ok=True)
    (run / NEWEST).unlink(missing_ok=True)
    return run


def stop_build(folder: Path, entries: list[Any] | None = None) -> None:
    """Make a built data set one whose build was stopped after these shards (default: after all)."""
    header = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").unlink()
    shards, _ = header.pop("shards"), header.pop("sha256")
    lines = [header, *(shards if entries is None else entries)]
    (folder / "progress.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))


# ---------------------------------------------------------------------------------- damage


class Gone:
    """A value that `put` removes."""

    def __repr__(self):
        return "gone"


GONE = Gone()


def put(values: Any, place: str | Sequence[str], value: Any) -> None:
    """Set the value at a place such as `task.settings` or `shards.0.rows`, or remove it (GONE)."""
    *parents, last = place.split(".") if isinstance(place, str) else place
    for name in parents:
        values = values[int(name) if isinstance(values, list) else name]
    if value is GONE:
        del values[last]
    else:
        values[int(last) if isinstance(values, list) else last] = value


def edit(path: Path, place: str | Sequence[str], value: Any) -> None:
    """Write a JSON file again with another value at a place."""
    values = json.loads(path.read_text())
    put(values, place, value)
    path.write_text(json.dumps(values))


def plant(path: Path, kind: str, target: Path | None = None) -> Path:
    """Replace a file by a pipe, a folder, or a link: to a device, itself, nothing or `target`."""
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "hard link":
        os.link(target, path)
    else:
        elsewhere = {"device": "/dev/zero", "loop": path, "dangling": "/nowhere"}
        path.symlink_to(elsewhere.get(kind, target))
    return path


def tree(folder: Path) -> dict[str, Any]:
    """Every name below a folder with its type, and its content where it is a file."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = ("link", os.readlink(path))
        elif path.is_file():
            found[name] = ("file", path.read_bytes(), path.stat().st_mtime_ns)
        else:
            found[name] = ("folder" if path.is_dir() else "other",)
    return found
