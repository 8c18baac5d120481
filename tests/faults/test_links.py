"""Links and pipes in untrusted folders: no command writes through them, or waits for them."""

import json
import shutil
import sys
import time
import types

import pytest
from damage import (
    EVERYTHING,
    NEWEST,
    OLDER,
    RECIPE,
    SMALL,
    WHERE,
    command_line,
    edit,
    plant,
    stop_build,
    tree,
)
from harness import run_command, run_well

KINDS = ("symbolic link", "dangling link", "hard link", "pipe")
PLACES = {
    "train": (
        *("lock", "records.jsonl", "timing.jsonl", "snapshots.jsonl", "config.json"),
        *("config.json.part", "environment.json", "environment.json.part", "result.json.part"),
        *("step-000000002.safetensors.part", "best.safetensors.part"),
    ),
    "resume": (
        *("lock", "records.jsonl", "timing.jsonl", "snapshots.jsonl", "config.json"),
        *("environment.json", "environment.json.part", "result.json", "result.json.part"),
        *(NEWEST, f"{NEWEST}.part", OLDER, "best.safetensors", "best.safetensors.part"),
    ),
    "eval": (
        *("config.json", "best.safetensors", "result.json", "test.json", "test.json.part"),
        *("eval-test.json", "eval-test.json.part", "eval-test.png", "eval-test.png.part"),
    ),
    "export": (
        *(".dlrnn-begun", "model.safetensors", "model.safetensors.part", "config.json"),
        *("config.json.part", "README.md", "README.md.part"),
    ),
    "build": (
        *("progress.jsonl", "progress.jsonl.part", "manifest.json", "manifest.json.part"),
        *("train-00000.parquet", "train-00000.parquet.part"),
    ),
    "results": ("records.jsonl.part", "curves/{stem}.csv", "curves/{stem}.csv.part"),
    "sweep": (f"tiny/{RECIPE}/seed-0.log",),
    "reproduce": ("tiny/table1.md", "tiny/table1.md.part"),
}
WRITTEN = {
    "train": ("result.json", "best.safetensors", NEWEST),
    "resume": ("result.json", "best.safetensors", NEWEST),
    "eval": ("eval-test.json", "eval-test.png", "test.json"),
    "export": ("model.safetensors", "config.json"),
    "build": ("manifest.json", "train-00000.parquet"),
    "results": ("records.jsonl",),
    "sweep": PLACES["sweep"],
    "reproduce": ("tiny/table1.md",),
}
CASES = [
    (command, place, kind)
    for command, places in PLACES.items()
    for number, place in enumerate(places)
    for kind in (KINDS if EVERYTHING else (KINDS[0], KINDS[1 + number // 2 % 3])[: 1 + number % 2])
]


@pytest.fixture
def outside(tmp_path, monkeypatch):
    """A folder that no command may write into."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", shutil.which("echo"))  # a sweep trains nothing
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "other").write_bytes(b"another file")
    return tmp_path / "outside"


@pytest.fixture
def prepared(made, copied, tmp_path):
    """Make a folder and a command line that writes into it."""

    def prepared(command):
        if command in ("resume", "eval", "reproduce"):
            work = copied(command, tmp_path)
            if command == "resume":  # so that both are written again
                edit(work / "environment.json", "torch", "0")
                (work / "best.safetensors").unlink()
            if command == "reproduce":
                work = tmp_path / "runs"
            return work, command_line(command, tmp_path)
        work = tmp_path / "work"
        size = ["--samples", "6", "--workers", "1"]
        arguments = {
            "train": ["train", RECIPE, *SMALL, "--out", work, *WHERE, "--json"],
            "export": ["export", made / "run", work],
            "build": ["data", "build", "listops", *size, "--out", work],
            "results": ["results", "add", made / "run", "--into", work, "--replace"],
            "sweep": ["sweep", RECIPE, "--scale", "tiny", "--out", work, "--device", "cpu"],
        }
        source = {"export": "export", "build": "set", "results": "results"}.get(command)
        if source:
            shutil.copytree(made / source, work)
        if command == "build":  # before its training split
            entries = json.loads((work / "manifest.json").read_text())["shards"]
            stop_build(work, [each for each in entries if not each["file"].startswith("train")])
            (work / "train-00000.parquet").unlink()
        if command == "results":
            (work / "records.jsonl").write_bytes(b"")
        work.mkdir(exist_ok=True)
        return work, arguments[command]

    return prepared


@pytest.mark.parametrize("command", WRITTEN)
def test_without_links_every_command_writes(command, prepared, outside):
    """Without this, what holds below could hold because nothing was written at all."""
    work, arguments = prepared(command)
    began = time.time_ns()
    outcome = run_command(arguments, seconds=60)
    assert outcome.status == (1 if command == "sweep" else 0), outcome  # echo trains nothing
    for name in WRITTEN[command]:
        assert (work / name).stat().st_mtime_ns > began - 10**9, name


def plant_link(place, kind, victim):
    """Put a link or a pipe at a place; a link leads to a copy of what was there, and more."""
    place.parent.mkdir(parents=True, exist_ok=True)
    before = place.read_bytes() if place.is_file() else b""
    if kind in ("symbolic link", "hard link"):
        more = b'{"precious": 1}\n' if place.name.endswith("jsonl") else b""
        victim.write_bytes(before + more or b"precious")
    plant(place, kind, victim)


@pytest.mark.parametrize(("command", "place", "kind"), CASES)
def test_nothing_is_written_through_a_link(command, place, kind, prepared, made, outside):
    work, arguments = prepared(command)
    [curve] = (made / "results" / "curves").iterdir()
    path = work / place.format(stem=curve.stem)
    plant_link(path, kind, outside / "victim")
    before = tree(outside)
    outcome = run_command(arguments, seconds=15, fifo=path if kind == "pipe" else None)
    assert tree(outside) == before, "something outside the folder was written"
    faults = [each for each in outcome.faults() if not each.startswith("event subprocess.Popen")]
    assert not faults, outcome
    assert outcome.status in ((0, 1, 2) if command == "sweep" else (0, 2)), outcome
    if outcome.status == 2:
        assert str(work) in outcome.text, "neither the file nor the folder is named"


FOLDERS = [
    *(("train", "tensorboard"), ("resume", "tensorboard"), ("train", "wandb"), ("resume", "wandb")),
    *(("results", "curves"), ("results", "snapshots")),
]


@pytest.mark.parametrize(("command", "name"), FOLDERS)
def test_nothing_is_written_into_a_linked_folder(command, name, prepared, outside, monkeypatch):
    work, arguments = prepared(command)
    if name == "wandb":
        monkeypatch.setitem(sys.modules, "wandb", fake_wandb())
    if name in ("tensorboard", "wandb"):
        arguments = [each if each != "none" else name for each in arguments]
    shutil.rmtree(work / name, ignore_errors=True)
    (work / name).symlink_to(outside, target_is_directory=True)
    before = tree(outside)
    outcome = run_command(arguments, seconds=60)
    assert tree(outside) == before, "something outside the folder was written"
    assert not outcome.faults(), outcome
    assert outcome.status in (0, 2), outcome


def fake_wandb():
    """The part of Weights & Biases that a run uses; it keeps nothing."""
    module = types.ModuleType("wandb")
    module.__file__ = __file__
    run = types.SimpleNamespace(step=0, log=lambda *_, **__: None, finish=lambda: None)
    module.init = lambda **_: run
    return module


@pytest.mark.parametrize("command", ["train", "resume", "eval", "export"])
def test_a_run_in_a_linked_folder_of_the_users_is_used(command, prepared, tmp_path):
    """The path that a user types may lead over links: `runs -> /scratch/runs` is common."""
    work, arguments = prepared(command)
    work.rename(tmp_path / "scratch")
    work.symlink_to(tmp_path / "scratch", target_is_directory=True)
    run_well(arguments)
    assert work.is_symlink()
