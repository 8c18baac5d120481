"""Metrics, the best checkpoint, padding, losses of micro-batches."""

import math

import pytest
import torch
from runs import QUIET, config, fails_at, make, weights
from support import DEVICE, assert_close

from dlrnn import tasks
from dlrnn.models import ModelConfig
from dlrnn.tasks.atomic.tasks import Shift
from dlrnn.train import TaskConfig, make_model, train, trainer
from dlrnn.train.checkpoint import read_checkpoint, read_header
from dlrnn.train.step import forward, scores


def test_each_sequence_has_the_same_weight():
    """The last batch of a set may be smaller."""
    task = config().make_task()
    model = make_model(config(), task).to(DEVICE)
    large, small = (task.sample(n, split="test", step=0, device=DEVICE) for n in (7, 2))
    one, other = scores(model, task, iter([large])), scores(model, task, iter([small]))
    both = scores(model, task, iter([large, small]))
    assert both == pytest.approx({name: (7 * one[name] + 2 * other[name]) / 9 for name in one})


def test_evaluation_disables_dropout_and_restores_the_mode():
    run = config(model=ModelConfig("dlr", {"d_state": 4, "dropout": 0.5}, d_model=16))
    task = run.make_task()
    model = make_model(run, task).to(DEVICE).train()
    batch = task.sample(8, split="validation", device=DEVICE)
    found = scores(model, task, iter([batch]))
    assert model.training, "as it was"
    assert found == scores(model, task, iter([batch])) == scores(model.eval(), task, iter([batch]))
    assert not model.training, "as it was"


def test_the_best_checkpoint_has_the_best_validation(tmp_path, monkeypatch):
    """With given scores, the second of four is the best; the model is that of its step."""
    given = iter([math.nan, 0.5, 0.2, 0.4, 0.0])
    splits = []
    original, score = trainer.held_out, {}

    def watched(task, run, split, *rest, **share):
        splits.append(split)
        score["R2"] = next(given)
        return original(task, run, split, *rest, **share)

    monkeypatch.setattr(trainer, "held_out", watched)
    monkeypatch.setattr(
        Shift, "metrics", lambda self, output, batch: {"R2": torch.tensor(score["R2"])}
    )
    result = train(tmp_path / "run", config(eval_every=3), **QUIET)
    assert splits == ["validation"] * 4
    assert (result["best"], result["best_step"]) == (0.5, 6)
    train(tmp_path / "six", config(steps=6, checkpoint_every=6, eval_every=99), **{**QUIET})
    best = read_checkpoint(tmp_path / "run" / "best.safetensors")[0]
    six = weights(tmp_path / "six")
    assert all(torch.equal(value, six[name]) for name, value in best.items())


def test_a_best_model_that_a_resume_does_not_reach_is_kept(tmp_path, monkeypatch):
    """Step 6 is the best, then the run dies; resumed from step 4, it scores less at step 6."""
    given = iter([0.8, 0.9, 0.79, 0.5, 0.5])

    def metrics(self, output, batch):
        return {"R2": torch.tensor(next(given))}

    monkeypatch.setattr(Shift, "metrics", metrics)
    run = config(eval_every=3, eval_batches=1)
    with fails_at(6):
        train(tmp_path / "run", run, **QUIET)
    result = train(tmp_path / "run", **QUIET)
    there = read_header(tmp_path / "run" / "best.safetensors")
    assert (result["best"], result["best_step"]) == pytest.approx((0.9, 6))
    assert (there["value"], there["step"]) == pytest.approx((0.9, 6))


def test_padding_does_not_change_the_output():
    run = config(
        task=TaskConfig("listops"),
        model=ModelConfig("dlr", {"d_state": 4, "bidirectional": True}, d_model=4),
    )
    task = run.make_task()
    model, batch = make(run).eval(), task.sample(2)
    longer = batch.inputs.clone()
    for row, length in zip(longer, batch.lengths, strict=True):
        row[length:] = 3
    assert_close(forward(model, batch._replace(inputs=longer)), forward(model, batch), 1e-6)


@pytest.mark.parametrize("name", ["listops-subtrees", "pathfinder-segmentation"])
def test_losses_of_micro_batches_add_up(name):
    small = {"listops-subtrees": {"length": 128}, "pathfinder-segmentation": {"resolution": 32}}
    task = tasks.get(name, **small[name])
    whole = task.sample(4)
    output = torch.randn(4, task.input_length, task.d_output)
    totals = task.totals(whole)
    parts = [
        task.loss(
            output[k : k + 1],
            type(whole)(whole.inputs[k : k + 1], whole.targets[k : k + 1]),
            totals,
        )
        for k in range(4)
    ]
    assert_close(sum(parts), task.loss(output, whole), 1e-6)
