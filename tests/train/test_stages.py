"""Training at growing lengths: one run, whose task and mixers grow; exact on resume."""

import json

import pytest
import torch
from runs import QUIET, assert_resumes_exactly, config, fails_at, refused, weights
from support import DEVICE

from dlrnn.models import ModelConfig
from dlrnn.train import TaskConfig, load_best, train

TAPE = ModelConfig(
    "tape,sgconv",
    {"tape": {"length": 32, "heads": 2, "d_head": 4}, "sgconv": {"length": 32, "d_kernel": 2}},
    d_model=8,
    layers=2,
)


def growing(**changes):
    """Steps 0 to 4 at length 8, 5 to 8 at 16, 9 to 11 at 32; checkpoints at 4, 8 and 12."""
    stages = {"lengths": [8, 16, 32], "stage_steps": [5, 4], "stage_lr": [1e-2, 5e-3, 1e-3]}
    return config(task=TaskConfig("shift", {"length": 32}), model=TAPE, **stages, **changes)


@pytest.mark.parametrize(("checkpoint", "killed"), [(2, 3), (5, 6), (5, 5), (4, 10), (9, 9)])
def test_a_run_that_is_killed_in_any_stage_resumes_exactly(checkpoint, killed, tmp_path):
    """Also right before and right after the first step of a stage."""
    assert_resumes_exactly(tmp_path, growing(checkpoint_every=checkpoint), killed)


def test_a_run_ends_with_the_model_of_the_last_length(tmp_path):
    run = growing(eval_every=3)
    result = train(tmp_path / "run", run, **QUIET)
    assert weights(tmp_path / "run")["model.blocks.0.mixer.c"].shape == (2, 4, 17, 2)
    best = load_best(tmp_path / "run", DEVICE)
    assert best.task.length == 32
    assert result["parameters"] == sum(p.numel() for p in best.model.parameters())
    lines = (tmp_path / "run" / "records.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    evaluated = {each["step"]: each for each in records if each["split"] != "train"}
    assert {step: each.get("length") for step, each in evaluated.items()} == {
        **{3: 8, 6: 16, 9: 16},
        12: None,
    }
    assert [evaluated[step]["split"] for step in (3, 12)] == ["stage", "validation"]
    assert result["best_step"] == 12
    rates = {each["step"]: each["lr"] for each in records if each["split"] == "train"}
    assert rates == pytest.approx({4: 1e-2, 8: 5e-3, 12: 1e-3})


def test_batches_have_the_length_of_the_stage(tmp_path, monkeypatch):
    from dlrnn.nn import TapeDLR

    seen, forward = [], TapeDLR.forward

    def noted(self, x, *rest, **options):
        if torch.is_grad_enabled():
            seen.append((x.shape[1], self.length))
        return forward(self, x, *rest, **options)

    monkeypatch.setattr(TapeDLR, "forward", noted)
    train(tmp_path / "run", growing(), **QUIET)
    assert seen == [(8, 8)] * 5 + [(16, 16)] * 4 + [(32, 32)] * 3


def test_a_run_stopped_between_two_stages_has_the_shorter_model(tmp_path):
    with fails_at(5):
        train(tmp_path / "run", growing(checkpoint_every=5), **QUIET)
    assert weights(tmp_path / "run")["model.blocks.0.mixer.c"].shape == (2, 4, 5, 2)


def test_tasks_without_a_length_are_refused(tmp_path, unchecked):
    task = TaskConfig("pathfinder", {})
    refused(tmp_path / "run", "pathfinder has no length", config(task=task, lengths=[4, 8]))
