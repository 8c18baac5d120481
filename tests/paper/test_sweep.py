"""Many runs: what is complete is left alone, one that breaks does not stop the others."""

import importlib
import os
import shlex
import signal
import subprocess
import sys
import time

import pytest

from dlrnn.paper.recipes import chosen, get
from dlrnn.paper.runs import run_of
from dlrnn.paper.sweep import Job, sweep, train_command
from dlrnn.train import RunDirectory

MODULE = importlib.import_module("dlrnn.paper.sweep")
STEPS = ["--steps", "3"]


def path_of(name, out, *, overrides=STEPS, scale="tiny", seed=0):
    return run_of(get(name), out, scale, seed, overrides).path


@pytest.mark.parametrize(
    ("asked", "same"),
    [
        (["table1/cum*/dlr-1", "table1/cumsum/dlr-1"], ["table1/cum*/dlr-1"]),
        (["table1"], ["table1/*", "table1"]),
        (["table1/shift/"], ["table1/shift/*"]),
    ],
)
def test_recipes_are_chosen_by_pattern(asked, same):
    assert chosen(asked) == chosen(same) != []


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("tabel1/*", "table1/*"),
        ("tabel1", "table1/*"),
        ("table1/shfit/*", "table1/shift/*"),
        ("Table1/*/dlr1", "table1/*/dlr-1"),
        ("*/dlr1", "*/dlr-1"),
        ("table1/shfit/dlr-1", "table1/shift/dlr-1"),
        ("table9/*", "table1/*"),
        ("table1/s", "table1/shift/*"),
    ],
)
def test_a_wrong_pattern_is_told_the_nearest(wrong, right):
    with pytest.raises(ValueError, match="there is no recipe") as error:
        chosen([wrong])
    assert str(error.value) == f"there is no recipe {wrong!r}: did you mean {right!r}?"
    assert chosen([right])


def test_a_sweep(tmp_path, monkeypatch, capsys):
    cumsum, cummax = "table1/cumsum/dlr-1", "table1/cummax/dlr-1"
    options = {"overrides": STEPS, "scale": "tiny", "out": tmp_path, "seeds": [0], "jobs": 2}

    def swept():
        rows = {row["recipe"]: row for row in sweep(["table1/cum*/dlr-1"], **options)}
        return rows[cumsum], rows[cummax], capsys.readouterr().err.splitlines()

    broken = path_of(cummax, tmp_path)
    broken.mkdir(parents=True)
    (broken / "something").write_text("of somebody else")
    complete, other, said = swept()
    assert (complete["status"], complete["paper"], other["status"]) == ("done", 1.0, "broken")
    assert "is not empty" in other["said"]
    assert any(line.startswith(f"{cumsum}, seed 0: begins, ") for line in said)
    assert {f"{cumsum}, seed 0: done", f"{cummax}, seed 0: broken"} <= set(said)
    (broken / "something").unlink()
    done = path_of(cumsum, tmp_path)
    written = (done / "result.json").stat().st_mtime_ns
    assert {row["status"] for row in swept()[:2]} == {"done"}
    assert (done / "result.json").stat().st_mtime_ns == written, "not run again"

    def evaluate_best(path, device, **_):
        if path == done:
            raise RuntimeError("CUDA out of memory\nand much more")

    monkeypatch.setattr(MODULE, "evaluate_best", evaluate_best)
    (broken / "result.json").unlink()  # as if stopped after its last checkpoint
    complete, other, said = swept()
    assert (complete["status"], complete["said"]) == ("broken", "CUDA out of memory")
    assert other["status"] == "done", "one does not stop the others"
    assert said[0] == f"{cummax}, seed 0: goes on from step 3, {broken.with_suffix('.log')}"
    assert RunDirectory.open(broken).result["steps"] == 3


def test_a_run_without_a_checkpoint_begins_again(tmp_path):
    run = run_of(get("table1/cumsum/dlr-1"), tmp_path, "tiny")

    def starts():
        return Job(run, train_command(run, ["--scale", "tiny"])).starts

    assert starts() == "begins"
    run.path.mkdir(parents=True)
    (run.path / "config.json").write_text(run.config.to_json())
    assert starts() == "begins", "a folder is no checkpoint"
    for step in (5, 12000):
        (run.path / f"step-{step:09d}.safetensors").touch()
    assert starts() == "goes on from step 12000"
    (run.path / "config.json").unlink()
    assert starts() == "begins", "and is refused: the folder is not empty"


def test_changed_settings_have_their_own_run_directory(tmp_path):
    recipe = get("table1/shift/dlr-1")
    own = run_of(recipe, tmp_path, "tiny", 1).path
    assert own == tmp_path / "tiny" / recipe.name / "seed-1"
    named = [["--steps", "3"], ["--steps", "4"], ["--steps", "3", "--lr", "2e-3"]]
    paths = {path_of(recipe.name, tmp_path, overrides=each, seed=1) for each in named}
    assert len(paths) == 3
    assert all(path.parent == own.parent and path.name.startswith("seed-1-") for path in paths)


def test_overrides_reach_every_run(tmp_path, monkeypatch):
    """A mixer of one's own: found where the command is given."""
    (tmp_path / "own_mixer.py").write_text(
        "import torch\n\n\nclass Twice(torch.nn.Linear):\n"
        "    def __init__(self, d_model):\n        super().__init__(d_model, d_model)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    changes = [*STEPS, "--model.mixer", "own_mixer.Twice", "--model.layers=1"]
    rows = sweep(["table1/cumsum/dlr-1"], overrides=changes, scale="tiny", out="out")
    assert [row["status"] for row in rows] == ["done"]
    for row in rows:
        config = RunDirectory.open(path_of(row["recipe"], "out", overrides=changes)).config
        assert (config.steps, config.model.mixer) == (3, "own_mixer.Twice")
        assert config.model.mixer_options == {}


@pytest.mark.parametrize(("number", "jobs"), [(signal.SIGINT, 2), (signal.SIGTERM, 1)])
def test_a_signal_stops_all_runs_with_a_checkpoint(tmp_path, number, jobs):
    """Of one more run than go at once, the last is not begun."""
    changes = ["--steps=4000", "--eval_every=4000", "--checkpoint_every=4000", "--log_every=1"]
    where = ["--scale", "tiny", "--out", str(tmp_path), "--device", "cpu"]
    asked = ["table1/cumsum/dlr-1", "--jobs", str(jobs), *where, *changes]
    asked += ["--seeds", str(jobs + 1)]
    listens = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)"
    code = f"{listens}; from dlrnn.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "sweep", *asked]  # even if we were told not to listen
    paths = [path_of(asked[0], tmp_path, overrides=changes, seed=k) for k in range(jobs + 1)]
    timings = [path / "timing.jsonl" for path in paths[:jobs]]
    pipe = {"stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, start_new_session=True, **pipe)
    while not all(path.exists() and path.read_text() for path in timings):  # a step was made
        assert process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, number)  # as a terminal does, and `timeout`
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130
    lines = said.strip().splitlines()
    stopped = sorted(line.partition("seed ")[2] for line in lines if line.endswith(": stopped"))
    assert stopped == [f"{k}: stopped" for k in range(jobs)]
    assert lines[-1].startswith("dlrnn sweep: stopped; the same command")
    for path in paths[:jobs]:
        (checkpoint,) = path.glob("step-*.safetensors")
        assert 0 < int(checkpoint.stem[5:]) < 4000
    assert not paths[jobs].exists()


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
    changes = ["--precision", "bf16"]
    options = {"overrides": changes, "seeds": [0, 1], "out": tmp_path}
    rows = sweep(["table1/cum*/dlr-1"], slurm="gpus", **options)
    assert [row["said"] for row in rows] == [f"submitted as {k}" for k in (1, 2, 3, 4)]
    assert {row["status"] for row in rows} == {"not run"}
    for command, row in zip(sent, rows, strict=True):
        shell, option, line = command
        assert (shell, option) == ("bash", "-c")
        train, test = (shlex.split(each)[3:] for each in line.split(" && "))
        place = {"overrides": changes, "scale": "full", "seed": row["seed"]}
        path = str(path_of(row["recipe"], tmp_path, **place))
        assert train[:3] == ["dlrnn", "train", row["recipe"]]
        assert train[train.index("--out") + 1] == path
        assert train[train.index("--precision") + 1] == "bf16"
        assert test == ["dlrnn", "eval", path, "--device", "cpu"]


@pytest.fixture
def started(monkeypatch):
    """The jobs that a sweep starts; none of them runs."""
    found = []
    monkeypatch.setattr(MODULE, "run_job", lambda job, *_: found.append(job) or "")
    monkeypatch.setattr(MODULE, "evaluate_best", lambda *_, **__: None)
    return found


def test_options_reach_the_runs(started, tmp_path):
    for wanted in (True, False):
        sweep(["table1/cumsum/dlr-1"], early_stop=wanted, scale="tiny", out=tmp_path, device="cpu")
    assert [("--early-stop" in job.command) for job in started] == [True, False]
    assert started[1].command[-2:] == ["--device", "cpu"]


@pytest.mark.parametrize("content", ["[]", None], ids=["damaged", "other settings"])
def test_a_refused_run_directory_does_not_stop_the_others(content, started, tmp_path):
    path = path_of("table1/cummax/dlr-1", tmp_path)
    path.mkdir(parents=True)
    config = run_of(get("table1/cummax/dlr-1"), tmp_path, "tiny").config
    (path / "config.json").write_text(content or config.to_json())
    rows = sweep(["table1/cum*/dlr-1"], overrides=STEPS, scale="tiny", out=tmp_path)
    status = {row["recipe"]: row["status"] for row in rows}
    assert status == {"table1/cumsum/dlr-1": "not run", "table1/cummax/dlr-1": "refused"}
    assert [job.run.recipe.name for job in started] == ["table1/cumsum/dlr-1"]
    if content is None:
        said = [row["said"] for row in rows if row["status"] == "refused"]
        assert "is not of this recipe: its steps is 1000, not 3" in said[0]
