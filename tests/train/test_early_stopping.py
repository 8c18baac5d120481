"""Runs whose metric stays at 0 or 1 stop early."""

import json
import math

import pytest
from runs import QUIET, assert_same_files, assert_same_weights, config, refused

from dlrnn.train import RunDirectory, early_stopping, train
from dlrnn.train.checkpoint import checkpoints
from dlrnn.train.early_stopping import should_stop


def constant(value, last=None):
    """Eight evaluations of one value, perhaps with another last one."""
    return [(step, value) for step in range(1, 8)] + [(8, value if last is None else last)]


@pytest.mark.parametrize(
    ("evaluations", "planned", "stops"),
    [
        (constant(0.995), 100, True),
        (constant(0.001), 16, True),
        (constant(0.001), 100, False),  # at 0 it gets half of its steps
        (constant(-0.004), 16, True),  # below 0 is chance
        (constant(0.995)[-2:], 16, False),  # three evaluations at least
        ([(3, 0.5), *constant(0.995)[3:]], 16, True),
        ([(4, 0.5), *constant(0.995)[4:]], 16, False),  # all of the last half
        (constant(0.995, last=math.nan), 16, False),
        (constant(0.001, last=-0.006), 16, False),
        (constant(0.001, last=0.0025), 16, False),
        (constant(0.989), 16, False),
        (constant(1.001), 16, False),
    ],
)
def test_a_constant_metric_may_stop(evaluations, planned, stops):
    assert should_stop(evaluations, 8, planned) == stops


def test_early_stopping_is_the_same_after_a_resume(tmp_path, monkeypatch):
    run = config(steps=400, eval_every=10, checkpoint_every=40)
    monkeypatch.setattr(early_stopping, "LEVELS", {0: (-0.05, 0.05), 1: (0.95, 1.0)})
    how = {"early_stop": True, **QUIET}
    result = train(tmp_path / "run", run, **how)
    steps = result["steps"]
    assert 30 <= steps < 400
    assert result["stopped"] == "R2 between 0.95 and 1.0 for the last half of them"
    assert RunDirectory.open(tmp_path / "run").records()[-1]["step"] == steps
    train(tmp_path / "cut", run, **how)
    for path in checkpoints(tmp_path / "cut")[1:]:
        path.unlink()
    (tmp_path / "cut" / "result.json").unlink()
    assert train(tmp_path / "cut", **how)["steps"] == steps
    assert_same_weights(tmp_path / "run", tmp_path / "cut")
    (tmp_path / "cut" / "result.json").unlink()  # killed right before it was written
    assert train(tmp_path / "cut", **how)["steps"] == steps
    assert_same_files(tmp_path / "run", tmp_path / "cut", ["records.jsonl"])
    snapshots = (tmp_path / "run" / "snapshots.jsonl").read_text().splitlines()
    assert json.loads(snapshots[-1])["step"] == steps
    splits = [each["split"] for each in RunDirectory(tmp_path / "run").records()]
    assert set(splits[-2:]) == {"train", "validation"}, "its last loss, too"
    complete = config(steps=steps, eval_every=10, checkpoint_every=40)
    whole = train(tmp_path / "whole", complete, **how)
    assert whole["steps"] == steps
    assert "stopped" not in whole, "it has made all of its steps"


def test_early_stopping_refuses_a_loss(tmp_path, monkeypatch):
    """A loss may stay near 1 and fall later."""
    monkeypatch.setattr(type(config().make_task()), "less_is_better", True)
    refused(tmp_path / "run", "--early-stop needs a metric", config(), early_stop=True)
