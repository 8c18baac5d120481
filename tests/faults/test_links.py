"""Links and pipes in untrusted folders: no command writes through them, or waits for them."""

import json
import os
import shutil
import sys
import time
import types
from pathlib import Path

import pytest
from hostile import (
    EVERYTHING,
    RECIPE,
    RUN_IN_SWEEP,
    SMALL,
    WHERE,
    as_recipe,
    assert_refused,
    command_line,
    run_command,
    stop,
    tree,
)

pytestmark = pytest.mark.usefixtures("unchecked")

KINDS = ("symbolic link", "dangling link", "hard link", "pipe")
CHECKPOINT = "step-000000006.safetensors"
NEW_RUN = (
    *("lock", "records.jsonl", "timing.jsonl", "snapshots.jsonl", "config.json"),
    *("config.json.part", "environment.json", "environment.json.part", "result.json.part"),
    *("step-000000002.safetensors.part", "best.safetensors.part"),
)
RESUMED = (
    *("lock", "records.jsonl", "timing.jsonl", "snapshots.jsonl", "config.json"),
    *("environment.json", "environment.json.part", "result.json", "result.json.part"),
    *(CHECKPOINT, f"{CHECKPOINT}.part", "step-000000004.safetensors"),
    *("best.safetensors", "best.safetensors.part"),
)
EVALUATED = (
    *("config.json", "best.safetensors", "result.json", "test.json", "test.json.part"),
    *("eval-test.json", "eval-test.json.part", "eval-test.png", "eval-test.png.part"),
)
EXPORTED = (
    *(".dlrnn-begun", "model.safetensors", "model.safetensors.part", "config.json"),
    *("config.json.part", "README.md", "README.md.part"),
)
BUILT = (
    *("progress.jsonl", "progress.jsonl.part", "manifest.json", "manifest.json.part"),
    *("train-00000.parquet", "train-00000.parquet.part"),
)
RECORDED = ("records.jsonl.part", "curves/{stem}.csv", "curves/{stem}.csv.part")
SWEPT = (f"{RUN_IN_SWEEP}.log",)
REPRODUCED = ("tiny/table1.md", "tiny/table1.md.part")
PLACES = {
    "train": NEW_RUN,
    "resume": RESUMED,
    "eval": EVALUATED,
    "export": EXPORTED,
    "build": BUILT,
    "results": RECORDED,
    "sweep": SWEPT,
    "reproduce": REPRODUCED,
}
CASES = [
    (command, place, kind)
    for command, places in PLACES.items()
    for number, place in enumerate(places)
    for kind in (KINDS if EVERYTHING else (KINDS[0], KINDS[1 + number // 2 % 3])[: 1 + number % 2])
]


@pytest.fixture(scope="module")
def made(trained, tmp_path_factory):
    """Folders that the commands write into: a run, an export, a built set, recorded results."""
    base = tmp_path_factory.mktemp("made")
    run = Path(shutil.copytree(trained, base / "run"))
    for command in (
        ["eval", run, "--device", "cpu"],
        ["export", run, base / "export"],
        ["data", "build", "listops", "--samples", "6", "--workers", "1", "--out", base / "set"],
        ["results", "add", run, "--into", base / "results"],
    ):
        outcome = run_command(command, seconds=60)
        assert outcome.status == 0, outcome
    stale = json.loads((run / "environment.json").read_text()) | {"torch": "0"}
    (run / "environment.json").write_text(json.dumps(stale))  # so that it is written again
    return base


@pytest.fixture
def base(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "other").write_bytes(b"another file")
    return tmp_path


def prepared(command, made, base):  # noqa: PLR0911 (one for each command)
    """The folder that is planted in, and the command line that writes into it."""
    work = base / "work"
    if command == "train":
        work.mkdir()
        return work, ["train", RECIPE, *SMALL, "--out", work, *WHERE, "--json"]
    if command in ("resume", "eval"):
        shutil.copytree(made / "run", work)
        if command == "eval":
            return work, ["eval", work, "--device", "cpu"]
        (work / "best.safetensors").unlink()  # so that it is written again
        return stop(work), ["train", "--resume", work, *WHERE, "--json"]
    if command == "export":
        shutil.copytree(made / "export", work)
        return work, ["export", made / "run", work]
    if command == "build":
        stopped_build(made / "set", work)
        size = ["--samples", "6", "--workers", "1"]
        return work, ["data", "build", "listops", *size, "--out", work]
    if command == "results":
        shutil.copytree(made / "results", work)
        (work / "records.jsonl").write_bytes(b"")
        return work, ["results", "add", made / "run", "--into", work, "--replace"]
    table = ["--scale", "tiny", "--out", work, "--device", "cpu"]
    if command == "sweep":
        (work / RUN_IN_SWEEP.parent).mkdir(parents=True)
        return work, ["sweep", RECIPE, *table]
    return work, ["reproduce", "table1", "--only", "shift/dlr-1", *table, "--json"]


def stopped_build(source, work):
    """A build that was stopped before its training split."""
    shutil.copytree(source, work)
    manifest = json.loads((work / "manifest.json").read_text())
    (work / "manifest.json").unlink()
    (work / "train-00000.parquet").unlink()
    header = {key: value for key, value in manifest.items() if key not in ("shards", "sha256")}
    rest = [shard for shard in manifest["shards"] if not shard["file"].startswith("train")]
    lines = [json.dumps(each) + "\n" for each in (header, *rest)]
    (work / "progress.jsonl").write_text("".join(lines))


WRITTEN = {
    "train": ("result.json", "best.safetensors", CHECKPOINT),
    "resume": ("result.json", "best.safetensors", CHECKPOINT),
    "eval": ("eval-test.json", "eval-test.png", "test.json"),
    "export": ("model.safetensors", "config.json"),
    "build": ("manifest.json", "train-00000.parquet"),
    "results": ("records.jsonl",),
    "sweep": SWEPT,
    "reproduce": ("tiny/table1.md",),
}


@pytest.mark.parametrize("command", WRITTEN)
def test_without_links_every_command_writes(command, made, base, monkeypatch):
    """Without this, what holds below could hold because nothing was written at all."""
    work, arguments = prepared(command, made, base)
    if command == "sweep":
        monkeypatch.setattr(sys, "executable", shutil.which("echo"))
    if command == "reproduce":
        as_recipe(Path(shutil.copytree(made / "run", work / RUN_IN_SWEEP)))
    began = time.time_ns()
    outcome = run_command(arguments, seconds=60)
    assert outcome.status == (1 if command == "sweep" else 0), outcome  # echo trains nothing
    for name in WRITTEN[command]:
        assert (work / name).stat().st_mtime_ns > began - 10**9, name


def plant(place, kind, outside):
    """Put a link or a pipe at a place; a link leads to a copy of what was there, and more."""
    victim = outside / "victim"
    place.parent.mkdir(parents=True, exist_ok=True)
    before = place.read_bytes() if place.is_file() else b""
    place.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(place)
        return
    if kind != "dangling link":
        more = b'{"precious": 1}\n' if place.name.endswith("jsonl") else b""
        victim.write_bytes(before + more or b"precious")
    if kind == "hard link":
        os.link(victim, place)
    else:
        place.symlink_to(victim)


@pytest.mark.parametrize(("command", "place", "kind"), CASES)
def test_nothing_is_written_through_a_link(command, place, kind, made, base, monkeypatch):
    work, arguments = prepared(command, made, base)
    if command == "sweep":
        monkeypatch.setattr(sys, "executable", shutil.which("echo"))  # instead of training
    if command == "reproduce":
        as_recipe(Path(shutil.copytree(made / "run", work / RUN_IN_SWEEP)))
    stems = [each.stem for each in (made / "results" / "curves").iterdir()]
    where = work / place.format(stem=stems[0])
    outside = base / "outside"
    plant(where, kind, outside)
    before = tree(outside)
    outcome = run_command(arguments, seconds=15, fifo=where if kind == "pipe" else None)
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
def test_nothing_is_written_into_a_linked_folder(command, name, made, base, monkeypatch):
    work, arguments = prepared(command, made, base)
    if name == "wandb":
        monkeypatch.setitem(sys.modules, "wandb", fake_wandb())
    if name in ("tensorboard", "wandb"):
        arguments = [each if each != "none" else name for each in arguments]
    shutil.rmtree(work / name, ignore_errors=True)
    outside = base / "outside"
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
def test_a_run_in_a_linked_folder_of_the_users_is_used(command, made, base):
    """The path that a user types may lead over links: `runs -> /scratch/runs` is common."""
    work, arguments = prepared(command, made, base)
    moved = base / "scratch"
    work.rename(moved)
    work.symlink_to(moved, target_is_directory=True)
    outcome = run_command(arguments, seconds=60)
    assert outcome.status == 0, outcome
    assert Path(work).is_symlink()


@pytest.mark.parametrize("command", ["eval", "export", "resume", "report", "results"])
@pytest.mark.parametrize("kind", ["folder", "pipe", "device"])
def test_a_config_that_is_no_file_is_refused(command, kind, made, base):
    run = Path(shutil.copytree(made / "run", base / "run"))
    path = run / "config.json"
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    arguments = command_line(command, run, base / "out")
    outcome = run_command(arguments, fifo=path if kind == "pipe" else None)
    assert_refused(outcome, "config.json")
