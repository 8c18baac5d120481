"""Scalars in TensorBoard and W&B, also after a resume."""

import importlib
import json
import re
import sys
import time

import pytest
from runs import fails_at
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dlrnn.models import ModelConfig
from dlrnn.train import RunConfig, RunDirectory, TaskConfig, train
from dlrnn.train.run_directory import open_writer

CONFIG = RunConfig(
    task=TaskConfig("cumsum", {"length": 8}),
    model=ModelConfig("dlr", {"d_state": 4}, d_model=8),
    steps=12,
    batch_size=2,
    log_every=2,
    eval_every=6,
    eval_batches=1,
    checkpoint_every=4,
)
SERVICE = """
import json
from pathlib import Path

class Run:
    def __init__(self, **about):
        self.path = Path(about["dir"]) / "sent.jsonl"
        self.step = 0
        if self.path.exists():  # a resumed run continues after its last step
            lines = self.path.read_text().splitlines()
            self.step = max(json.loads(line)[0] for line in lines) + 1
        self.write(self.step, about)

    def write(self, step, values):
        with open(self.path, "a") as file:
            print(json.dumps([step, values]), file=file)

    def log(self, values, step):
        assert step >= self.step, "which is ignored, with a warning"
        self.step = step
        self.write(step, values)

    def finish(self):
        self.write(self.step, "finished")

def init(**about):
    return Run(**about)
"""


@pytest.fixture(autouse=True)
def forgotten():
    """Each test imports its own wandb."""
    there = sys.modules.pop("wandb", None)
    yield
    sys.modules.pop("wandb", None)
    if there is not None:
        sys.modules["wandb"] = there


@pytest.fixture
def service(tmp_path, monkeypatch):
    """The path of a fake wandb that records what it receives."""
    place = tmp_path / "installed" / "wandb"
    place.mkdir(parents=True)
    (place / "__init__.py").write_text(SERVICE)
    monkeypatch.syspath_prepend(place.parent)
    return place / "__init__.py"


def in_two_parts(path, writer):
    """Killed after step 7 and resumed from step 4, a run writes steps 5 to 7 twice."""
    with fails_at(7):
        train(path, CONFIG, device="cpu", show=False, writer=writer)
    time.sleep(1.1)  # files of TensorBoard are named, and read, by the second
    train(path, device="cpu", show=False, writer=writer)


def recorded(path, split, name):
    """Values by step, as the run's own records have them."""
    lines = [json.loads(line) for line in (path / "records.jsonl").read_text().splitlines()]
    return {line["step"]: line[name] for line in lines if line["split"] == split}


def test_tensorboard_shows_each_step_once(tmp_path):
    path = tmp_path / "run"
    in_two_parts(path, "tensorboard")
    events = EventAccumulator(str(path / "tensorboard")).Reload()
    for tag in ("loss/train", "lr/train", "R2/validation", "loss/validation"):
        name, _, split = tag.partition("/")
        found = [(each.step, each.value) for each in events.Scalars(tag)]
        assert found == [(k, pytest.approx(v)) for k, v in recorded(path, split, name).items()]
    assert list(recorded(path, "train", "loss")) == [2, 4, 6, 8, 10, 12]


@pytest.mark.usefixtures("service")
def test_wandb_resumes_its_run(tmp_path):
    path = tmp_path / "run"
    in_two_parts(path, "wandb")
    sent = [json.loads(line) for line in (path / "sent.jsonl").read_text().splitlines()]
    begun = [values for _, values in sent if "id" in values]
    assert len(begun) == 2
    assert begun[0] == begun[1]
    assert len(begun[0].pop("id")) == 8
    settings = json.loads(CONFIG.to_json())
    about = {"dir": str(path), "name": str(path), "config": settings, "resume": "allow"}
    assert begun[0] == about
    assert [values for _, values in sent].count("finished") == 2
    for tag in ("loss/train", "R2/validation"):
        name, _, split = tag.partition("/")
        found = [(step, values[tag]) for step, values in sent if tag in values]
        assert found == list(recorded(path, split, name).items())


@pytest.mark.usefixtures("service")
@pytest.mark.parametrize("kept", [None, ""])
def test_wandb_uses_the_given_id(tmp_path, monkeypatch, kept):
    """An id on disk comes first; an empty file is not an id."""
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    (tmp_path / "run").mkdir()
    RunDirectory.create(tmp_path / "run", CONFIG)
    if kept is not None:
        (tmp_path / "run" / "wandb").mkdir()
        (tmp_path / "run" / "wandb" / "id").write_text(kept)
    for _ in range(2):
        open_writer("wandb", tmp_path / "run", 0).close()
        monkeypatch.setenv("WANDB_RUN_ID", "other")
    ids = re.findall(r'"id": "(\w+)"', (tmp_path / "run" / "sent.jsonl").read_text())
    assert ids == ["mine", "mine"]


def test_missing_wandb_makes_no_folder(tmp_path, monkeypatch):
    """A folder `wandb` in the current folder does not count as installed."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for folder in (None, "wandb"):
        if folder:
            (tmp_path / folder).mkdir()
        importlib.invalidate_caches()
        sys.modules.pop("wandb", None)
        with pytest.raises(ValueError, match="W&B was asked for and is not installed"):
            train(tmp_path / "run", CONFIG, device="cpu", show=False, writer="wandb")
        assert not (tmp_path / "run").exists()


def test_errors_of_wandb_are_one_sentence(tmp_path, service):
    service.write_text("def init(**about):\n    raise Exception('no key')\n")
    with pytest.raises(ValueError, match=r"^W&B: no key"):
        train(tmp_path / "run", CONFIG, device="cpu", show=False, writer="wandb")
    train(tmp_path / "run", CONFIG, device="cpu", show=False, writer="none")
