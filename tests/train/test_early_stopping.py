"""Runs whose metric stays at 0 or 1 stop early."""

import json
import math

import pytest
from runs import QUIET, assert_same_files, assert_same_weights, config

from dlrnn.train import RunDirectory, early_stopping, train
from dlrnn.train.checkpoint import checkpoints
from dlrnn.train.early_stopping import constant_level, should_stop


def test_a_constant_metric_may_stop():
    ones, noughts = [(k, 0.995) for k in range(1, 9)], [(k, 0.001) for k in range(1, 9)]
    assert should_stop(ones, 8, 100)
    assert constant_level(ones, 8) == 1
    assert not should_stop(noughts, 8, 100)
    assert should_stop(noughts, 8, 16)
    assert not should_stop(ones[-2:], 8, 16), "three evaluations at least"
    late = [(4, 0.5), *ones[4:]]
    assert not should_stop(late, 8, 16), "all of the last half"
    assert should_stop([(3, 0.5), *ones[3:]], 8, 16)
    assert not should_stop([*ones[:-1], (8, math.nan)], 8, 16)
    assert should_stop([(step, -0.004) for step, _ in noughts], 8, 16), "below 0 is chance"
    for last in (-0.006, 0.0025):
        assert not should_stop([*noughts[:-1], (8, last)], 8, 16), "the last value is outside"
    for value in (0.989, 1.001):
        assert not should_stop([(step, value) for step, _ in ones], 8, 16)


def test_early_stopping_is_the_same_after_a_resume(tmp_path, monkeypatch):
    run = config(steps=400, eval_every=10, checkpoint_every=40)
    monkeypatch.setattr(early_stopping, "LEVELS", {0: (-0.05, 0.05), 1: (0.95, 1.0)})
    result = train(tmp_path / "run", run, early_stop=True, **QUIET)
    steps = result["steps"]
    assert 30 <= steps < 400
    assert result["stopped"] == "R2 between 0.95 and 1.0 for the last half of them"
    assert RunDirectory.open(tmp_path / "run").records()[-1]["step"] == steps
    train(tmp_path / "cut", run, early_stop=True, **QUIET)
    for path in checkpoints(tmp_path / "cut")[1:]:
        path.unlink()
    (tmp_path / "cut" / "result.json").unlink()
    again = train(tmp_path / "cut", early_stop=True, **QUIET)
    assert again["steps"] == steps
    assert_same_weights(tmp_path / "run", tmp_path / "cut")
    (tmp_path / "cut" / "result.json").unlink()  # killed right before it was written
    assert train(tmp_path / "cut", early_stop=True, **QUIET)["steps"] == steps
    assert_same_files(tmp_path / "run", tmp_path / "cut", ["records.jsonl"])
    snapshots = (tmp_path / "run" / "snapshots.jsonl").read_text().splitlines()
    assert json.loads(snapshots[-1])["step"] == steps
    splits = [each["split"] for each in RunDirectory(tmp_path / "run").records()]
    assert set(splits[-2:]) == {"train", "validation"}, "its last loss, too"
    whole = train(
        tmp_path / "whole",
        config(steps=steps, eval_every=10, checkpoint_every=40),
        early_stop=True,
        **QUIET,
    )
    assert whole["steps"] == steps
    assert "stopped" not in whole, "it has made all of its steps"


def test_early_stopping_refuses_a_loss(tmp_path, monkeypatch):
    """A loss may stay near 1 and fall later."""
    monkeypatch.setattr(type(config().make_task()), "less_is_better", True)
    with pytest.raises(ValueError, match="--early-stop needs a metric"):
        train(tmp_path / "run", config(), early_stop=True, **QUIET)
    assert not (tmp_path / "run").exists()
