"""Run directories: never overwritten, resumed exactly, damage and changes are found."""

import json
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest
from runs import QUIET, config, refused, stopped, unfinished
from support import DEVICE

from dlrnn.common.files import write_whole
from dlrnn.models import ModelConfig
from dlrnn.tasks.pathfinder import Pathfinder, generator
from dlrnn.tasks.storage.build import build_set
from dlrnn.train import RunDirectory, TaskConfig, run_directory, train
from dlrnn.train.checkpoint import checkpoints, read_header
from dlrnn.train.evaluation import evaluate_run, export_run
from dlrnn.train.run_directory import JsonLines, checkout


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_run_directories_are_never_overwritten(tmp_path):
    run = tmp_path / "run"
    train(run, config(), **QUIET)
    before = contents(run)
    refused(run, "holds a run that is complete", config())
    unfinished(run)
    refused(run, "was stopped; .*`dlrnn train --resume", config())
    del before["result.json"]
    assert contents(run) == before
    refused(tmp_path, "is not empty", config())
    assert [path.name for path in tmp_path.iterdir()] == ["run"], "not even a lock"
    refused(tmp_path / "nothing", "there is no folder")


def test_a_run_killed_before_its_configuration_was_written_begins_again(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "environment.json").write_text("{}")
    (tmp_path / "run" / "config.json.part").write_text("{")
    assert train(tmp_path / "run", config(), **QUIET)["steps"] == 12


def test_a_run_in_use_raises(tmp_path):
    with RunDirectory(tmp_path / "run").locked():
        refused(tmp_path / "run", "is in use by another process", config())
        RunDirectory.create(tmp_path / "run", config())
        refused(tmp_path / "run", "is in use by another process")
    assert train(tmp_path / "run", **QUIET)["steps"] == 12


def test_a_run_without_a_step_may_be_replaced(tmp_path):
    with RunDirectory(tmp_path / "run").locked():
        RunDirectory.create(tmp_path / "run", config(steps=99))
    assert train(tmp_path / "run", config(), **QUIET)["steps"] == 12
    assert RunDirectory.open(tmp_path / "run").config == config()


def test_a_checkpoint_of_another_model_raises(tmp_path):
    stopped(tmp_path / "run", config())
    text = (tmp_path / "run" / "config.json").read_text()
    (tmp_path / "run" / "config.json").write_text(text.replace('"d_state": 16', '"d_state": 8'))
    refused(tmp_path / "run", r"is of another model: .* is \[16, 16, 2\], not \[16, 8, 2\]")


def test_a_changed_configuration_or_data_set_raises(tmp_path, monkeypatch):
    stopped(tmp_path / "run", config())
    path = tmp_path / "run" / "config.json"
    path.write_text(config(steps=20).to_json())
    refused(path.parent, "was begun with another configuration: begin a new run")
    path.write_text(config().to_json())
    with monkeypatch.context() as patch:
        patch.setattr(type(config().make_task()), "digest", lambda self: "another")
        refused(path.parent, "was begun with another set of data")
    assert train(path.parent, **QUIET)["steps"] == 12


def pathfinder_run(path, monkeypatch, version, **settings):
    """A run of one step, killed before its end, whose checkpoints name a generator, or None."""
    model = ModelConfig("attention", {"heads": 1, "bidirectional": True}, layers=1, d_model=4)
    run = config(task=TaskConfig("pathfinder", settings), model=model, batch_size=1, steps=1)
    with monkeypatch.context() as patch:
        if version is None:
            patch.setattr(Pathfinder, "generator_version", None)
        else:
            patch.setattr(generator, "VERSION", version)
        stopped(path, run)


@pytest.mark.parametrize(("version", "before"), [(None, "an unrecorded generator"), (1, "1")])
def test_runs_on_samples_of_another_generator_are_refused(version, before, tmp_path, monkeypatch):
    """Resumes and evaluations name both versions; the model can still be exported."""
    run = tmp_path / "run"
    pathfinder_run(run, monkeypatch, version)
    found = contents(run)
    sentence = f"on samples of .*{before}, and pathfinder now has those of generator 2: begin a new"
    refused(run, sentence)
    with pytest.raises(ValueError, match=sentence):
        evaluate_run(run, device=DEVICE.type)
    assert contents(run) == found
    assert Path(export_run(run, tmp_path / "exported")).is_dir()


def test_runs_on_samples_of_the_same_generator_continue(tmp_path, monkeypatch):
    """Samples are drawn, or from a data set; a run may be older than the data set."""
    counts = {"train": 4, "validation": 2, "test": 2}
    data = build_set(generator.lra(counts=counts), tmp_path / "data")
    for path, settings in ((tmp_path / "drawn", {}), (tmp_path / "read", {"folder": str(data)})):
        pathfinder_run(path, monkeypatch, 2, **settings)
        headers = [read_header(path / "best.safetensors"), read_header(checkpoints(path)[-1])]
        assert [header["generator"] for header in headers] == [2, 2]
        assert train(path, **QUIET)["steps"] == 1
        assert "metrics" in evaluate_run(path, device=DEVICE.type)
    pathfinder_run(tmp_path / "old", monkeypatch, None, folder=str(data))
    with pytest.raises(ValueError, match="on samples of an unrecorded generator"):
        evaluate_run(tmp_path / "old", device=DEVICE.type)
    (tmp_path / "data").rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"there is no folder .*data: create it with"):
        evaluate_run(path, device=DEVICE.type)


def test_exchanged_or_damaged_files_raise(tmp_path):
    run = tmp_path / "run"
    train(run, config(), **QUIET)
    (run / "environment.json").write_text("{")
    (run / "result.json").write_text("{}")
    refused(run, r"result.json is damaged: remove it and `dlrnn train")
    unfinished(run)
    assert train(run, **QUIET)["steps"] == 12, "no run needs its environment"
    for path in unfinished(run):
        path.write_bytes((run / "best.safetensors").read_bytes())
    refused(run, "its header has an unknown key 'metric'")


def test_data_that_change_during_a_run_raise(tmp_path, monkeypatch):
    digests = iter(["as it began", "as it began", "another"])
    monkeypatch.setattr(type(config().make_task()), "digest", lambda self: next(digests))
    with pytest.raises(ValueError, match="the set of data was changed while the run read it"):
        train(tmp_path / "run", config(), **QUIET)
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["step-000000004.safetensors"]


def test_concurrent_writes_are_atomic(tmp_path):
    """The last one wins; no content is mixed."""
    path, contents = tmp_path / "table.md", [bytes([65 + k]) * 200_000 for k in range(4)]

    def write(content):
        for _ in range(10):
            write_whole(path, content)
            assert path.read_bytes() in contents

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, contents))
    assert [each.name for each in tmp_path.iterdir()] == ["table.md"]


def test_json_lines_are_truncated_on_resume(tmp_path):
    path = tmp_path / "a.jsonl"
    lines = JsonLines(path, None)
    lines.append({"a": 1})
    known = lines.length()
    lines.append({"a": 2})
    lines.close()
    torn = '{"a": 1}\n{"torn'
    for length, expected in (
        (known, '{"a": 1}\n{"a": 3}\n'),
        (None, '{"a": 1}\n{"torn\n{"a": 3}\n'),  # on a new line
    ):
        path.write_text(torn)
        again = JsonLines(path, length)
        again.append({"a": 3})
        again.close()
        assert path.read_text() == expected


def test_unreadable_records_are_named(tmp_path):
    path = tmp_path / "records.jsonl"
    first = '{"step": 1, "split": "train", "loss": 0.5}'
    path.write_text(f'{first}\n{{"step": 2, "lo')
    assert RunDirectory(tmp_path).records() == [json.loads(first)], "the last was cut"
    for wrong in ("garbage", "[1, 2]", '{"step": 2}', "\N{SNOWMAN}", "[" * 10**5):
        path.write_text(f"{first}\n{wrong}\n")
        with pytest.raises(ValueError, match=r"records.jsonl, line 2, is not a record of a run"):
            RunDirectory(tmp_path).records()


def test_resumes_in_another_environment_are_recorded(tmp_path, monkeypatch):
    train(tmp_path / "run", config(), **QUIET)
    path, here = tmp_path / "run" / "environment.json", run_directory.environment()
    assert json.loads(path.read_text()) == here
    for place in ("here", "there", "there", "elsewhere"):
        now = here if place == "here" else {**here, "device": place}
        monkeypatch.setattr(run_directory, "environment", lambda now=now: now)
        (tmp_path / "run" / "result.json").unlink()
        train(tmp_path / "run", **QUIET)
    known = json.loads(path.read_text())
    assert [each["device"] for each in known.pop("then")] == ["there", "elsewhere"]
    assert known == here
    for left in (path.with_name("result.json"), *checkpoints(tmp_path / "run")):
        left.unlink()
    train(tmp_path / "run", **QUIET)
    assert json.loads(path.read_text()) == now, "a new beginning replaces it"
    timing = path.with_name("timing.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in timing] == [4, 8, 12]


@pytest.mark.skipif(DEVICE.type != "cpu", reason="threads matter on a CPU")
def test_a_resume_with_other_threads_warns(tmp_path, monkeypatch, capsys):
    run, here = tmp_path / "run", run_directory.environment()
    train(run, config(), **QUIET)
    for threads, warns in ((1, False), (3, True), (3, False), (1, True)):
        now = {**here, "threads": threads}
        monkeypatch.setattr(run_directory, "environment", lambda now=now: now)
        (run / "result.json").unlink()
        train(run, **QUIET)
        said = capsys.readouterr().err
        assert ("resumes it exactly" in said) == warns, said
    assert f"{run} had 3 threads" in said
    assert "OMP_NUM_THREADS=3" in said


def test_the_commit_of_tracked_sources_is_recorded(tmp_path):
    def git(*arguments):
        command = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    own, other = tmp_path / "own.py", tmp_path / "site-packages" / "other.py"
    other.parent.mkdir()
    own.write_text("1")
    other.write_text("1")
    assert checkout(own) == {"git": None, "changed": False}
    git("init")
    git("add", "own.py")
    git("commit", "-m", "one")
    assert checkout(own) == {"git": git("rev-parse", "HEAD"), "changed": False}
    assert checkout(other) == {"git": None, "changed": False}
    own.write_text("2")
    assert checkout(own)["changed"]


def test_a_full_disk_names_the_file_and_keeps_its_old_content(tmp_path, monkeypatch):
    write_whole(tmp_path / "a.json", b"old")
    full = Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr(os, "fsync", full)
    for name in ("a.json", "b.json"):
        with pytest.raises(OSError, match=rf"No space left on device: .*{name}"):
            write_whole(tmp_path / name, b"new and longer")
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    assert (tmp_path / "a.json").read_bytes() == b"old"
