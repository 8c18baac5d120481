"""Many runs: what is complete is left alone, one that breaks does not stop the others."""

import importlib
import shlex

import pytest

from dlrnn.recipes import run_path
from dlrnn.recipes.catalogue import get
from dlrnn.recipes.sweep import chosen, sweep
from dlrnn.train import RunFolder


@pytest.fixture
def small(monkeypatch):
    """Three steps a run: given to its process, and to what its folder is compared with."""
    module = importlib.import_module("dlrnn.recipes.sweep")
    own, scaled = module._job, module.run_config

    def few_steps(recipe, scale, seed):
        from dataclasses import replace

        return replace(scaled(recipe, scale, seed), steps=3)

    def job(*arguments):
        made = own(*arguments)
        if made is None or "--resume" in made.command:
            return made
        return made._replace(command=[*made.command, "--steps", "3", "--writer", "none"])

    outcome = importlib.import_module("dlrnn.recipes.outcome")
    monkeypatch.setattr(module, "_job", job)
    monkeypatch.setattr(module, "run_config", few_steps)
    monkeypatch.setattr(outcome, "run_config", few_steps)


def test_patterns():
    names = [recipe.name for recipe in chosen(["table1/cum*/dlr-1", "table1/cumsum/dlr-1"])]
    assert sorted(names) == ["table1/cummax/dlr-1", "table1/cumsum/dlr-1"]
    with pytest.raises(ValueError, match="there is no recipe"):
        chosen(["table9/*"])


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("tabel1/*", "table1/*"),
        ("table1", "table1/*"),
        ("table1/shfit/*", "table1/shift/*"),
        ("Table1/*/dlr1", "table1/*/dlr-1"),
        ("*/dlr1", "*/dlr-1"),
        ("table1/shfit/dlr-1", "table1/shift/dlr-1"),
    ],
)
def test_a_wrong_pattern_is_told_the_nearest(wrong, right):
    with pytest.raises(ValueError, match="there is no recipe") as error:
        chosen([wrong])
    assert str(error.value) == f"there is no recipe {wrong!r}: did you mean {right!r}?"
    assert chosen([right])


def test_a_sweep(small, tmp_path, monkeypatch, capsys):
    options = {"scale": "tiny", "out": tmp_path, "seeds": [0], "jobs": 2}
    broken = run_path(get("table1/cummax/dlr-1"), tmp_path, "tiny", 0)
    broken.mkdir(parents=True)
    (broken / "something").write_text("of somebody else")
    rows = sweep(["table1/cum*/dlr-1"], **options)
    by_name = {row["recipe"]: row for row in rows}
    assert by_name["table1/cumsum/dlr-1"]["status"] == "done"
    assert by_name["table1/cummax/dlr-1"]["status"] == "broken"
    assert "is not empty" in by_name["table1/cummax/dlr-1"]["said"]
    said = capsys.readouterr().err.splitlines()
    assert "table1/cumsum/dlr-1, seed 0: done" in said
    assert "table1/cummax/dlr-1, seed 0: broken" in said
    (broken / "something").unlink()
    done = run_path(get("table1/cumsum/dlr-1"), tmp_path, "tiny", 0)
    written = (done / "result.json").stat().st_mtime_ns
    assert all(row["status"] == "done" for row in sweep(["table1/cum*/dlr-1"], **options))
    assert (done / "result.json").stat().st_mtime_ns == written, "not run again"

    def score_best(path, device):
        if path == done:
            raise ValueError("best.safetensors is damaged")

    monkeypatch.setattr(importlib.import_module("dlrnn.recipes.sweep"), "score_best", score_best)
    by_name = {row["recipe"]: row for row in sweep(["table1/cum*/dlr-1"], **options)}
    assert by_name["table1/cumsum/dlr-1"]["status"] == "broken"
    assert by_name["table1/cumsum/dlr-1"]["said"] == "best.safetensors is damaged"
    assert by_name["table1/cummax/dlr-1"]["status"] == "done", "one does not stop the others"
    assert RunFolder.open(broken).result["steps"] == 3


def test_jobs_for_slurm(monkeypatch, tmp_path):
    """Each run is a job with the command that `sweep` would run itself, and its test."""
    import submitit

    sent = []

    class Executor:
        def __init__(self, folder):
            self.folder = folder

        def update_parameters(self, **settings):
            assert settings["partition"] == "gpus"

        def submit(self, function):
            sent.append(function.command)
            return type("Handle", (), {"job_id": str(len(sent))})

    monkeypatch.setattr(submitit, "SlurmExecutor", Executor)
    rows = sweep(["table1/cum*/dlr-1"], seeds=[0, 1], slurm="gpus", out=tmp_path)
    assert [row["said"] for row in rows] == [f"submitted as {k}" for k in (1, 2, 3, 4)]
    assert {row["status"] for row in rows} == {"not run"}
    for command, row in zip(sent, rows, strict=True):
        shell, option, line = command
        assert (shell, option) == ("bash", "-c")
        train, test = (shlex.split(each)[2:] for each in line.split(" && "))
        path = str(run_path(get(row["recipe"]), tmp_path, "full", row["seed"]))
        assert train[:3] == ["dlrnn", "train", row["recipe"]]
        assert test == ["dlrnn", "eval", path, "--device", "cpu"]


def test_one_bad_folder_does_not_stop_the_others(small, tmp_path):
    bad = run_path(get("table1/cummax/dlr-1"), tmp_path, "tiny", 0)
    bad.mkdir(parents=True)
    (bad / "config.json").write_text("[]")
    rows = sweep(["table1/cum*/dlr-1"], scale="tiny", out=tmp_path)
    status = {row["recipe"]: row["status"] for row in rows}
    assert status == {"table1/cumsum/dlr-1": "done", "table1/cummax/dlr-1": "broken"}
