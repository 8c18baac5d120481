"""What people do to runs, and what is said then."""

import importlib
import json
import os
import signal
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from dlrnn.common.files import write_whole
from dlrnn.models import ModelConfig
from dlrnn.train import RunConfig, RunFolder, TaskConfig, from_json, train, with_overrides
from dlrnn.train.checkpoint import checkpoints
from dlrnn.train.step import make_step

QUIET = {"show": False, "writer": "none"}
OPTIONS = {"order": "1", "name": "null", "pair": "x: y", "rate": "1e-3", "deep": {"a": "2"}}


class Own(nn.Module):
    """With options of any type."""

    def __init__(self, d_model, order=1, name=None, pair=None, rate=None, deep=None):
        super().__init__()
        self.linear, self.order = nn.Linear(d_model, d_model), order

    def forward(self, x):
        return self.linear(x)


class Rotating(nn.Module):
    """With a complex parameter."""

    def __init__(self, d_model):
        super().__init__()
        self.lam = nn.Parameter(torch.full((d_model,), 0.5 + 0.1j))

    def forward(self, x):
        return (x * self.lam).real


class Remembering(Own):
    """With something in its state that is no tensor."""

    def get_extra_state(self):
        return {"a": 1}

    def set_extra_state(self, state):
        pass


class Counting(Own):
    """With a buffer that forward replaces."""

    def __init__(self, d_model):
        super().__init__(d_model)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen = self.seen + 1
        return super().forward(x)


def config(mixer="dlr", options=None, *, settings=None, layers=1, **rest):
    options = {"d_state": 4} if mixer == "dlr" else options or {}
    model = ModelConfig(mixer, options, d_model=4, layers=layers)
    small = {"steps": 6, "batch_size": 2, "eval_every": 3, "eval_batches": 1}
    task = TaskConfig("shift", {"length": 16, "copies": 1, **(settings or {})})
    return RunConfig(task, model, **(small | {"checkpoint_every": 2, "lr": 1e-2} | rest))


def test_texts_stay_texts():
    run = config(f"{__name__}.Own", OPTIONS)
    assert from_json(run.to_json()) == run
    assert with_overrides(run, ["--steps", "9"]).model.mixer_options == OPTIONS
    given = ["--model.mixer_options.order", '"7"', "--model.mixer_options.rate=2"]
    assert with_overrides(run, given).model.mixer_options == OPTIONS | {"order": "7", "rate": 2}


def test_a_run_goes_on_with_the_options_it_began_with(tmp_path):
    train(tmp_path / "run", config(f"{__name__}.Own", OPTIONS), **QUIET)
    assert RunFolder.open(tmp_path / "run").config.model.mixer_options == OPTIONS


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"steps": 3.0}, "steps"),
        ({"schedule": "linear"}, "schedule"),
        ({"precision": "fp16"}, "precision"),
        ({"settings": {"seed": Path("a")}}, "is not JSON"),
    ],
    ids=str,
)
def test_what_cannot_be_makes_no_folder(wrong, sentence, tmp_path, unchecked):
    with pytest.raises(ValueError, match=sentence):
        train(tmp_path / "run", config(**wrong), **QUIET)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("wrong", [{"lr": torch.inf}, {"weight_decay": torch.nan}], ids=str)
def test_rates_are_finite(wrong):
    with pytest.raises(ValueError, match="must be"):
        config(**wrong)


def test_a_writer_that_is_none(tmp_path):
    with pytest.raises(ValueError, match="writer must be one of tensorboard, wandb, none, not 'x'"):
        train(tmp_path / "run", config(), show=False, writer="x")


def test_a_state_that_is_no_tensor_makes_no_folder(tmp_path):
    sentence = r"checkpoints hold tensors, and blocks.0.mixer._extra_state of the model is a dict"
    with pytest.raises(ValueError, match=sentence):
        train(tmp_path / "run", config(f"{__name__}.Remembering"), **QUIET)
    assert not (tmp_path / "run").exists()


def test_divergence_says_the_step_and_what_to_do(tmp_path):
    sentence = r"^step \d+: the run has diverged \(x holds nan .*\), .* with a smaller --lr"
    with pytest.raises(FloatingPointError, match=sentence):
        train(tmp_path / "run", config(lr=1e30, layers=2, steps=40), **QUIET)


def test_complex_parameters_learn(tmp_path):
    run = config(f"{__name__}.Rotating")
    assert train(tmp_path / "run", run, **QUIET)["steps"] == 6


def test_a_buffer_that_is_replaced_is_averaged_over_processes(monkeypatch):
    step = make_step(config(f"{__name__}.Counting"), torch.device("cpu"))
    several = Mock(wraps=step.fabric, world_size=2)
    several.all_reduce = lambda value, reduce_op: value + (10 if reduce_op == "mean" else 0)
    monkeypatch.setattr(step, "fabric", several)
    step._update(None)
    (seen,) = step.model.buffers()
    assert seen == 11, "its own 1, and what the others add"


def test_a_signal_at_the_last_step_is_not_lost(tmp_path, monkeypatch):
    """The run is complete, and what would come after it is not begun."""
    module = importlib.import_module("dlrnn.train.trainer")
    own = module.Trainer._evaluate

    def signalled(self, step):
        own(self, step)
        if step == self.config.steps:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(module.Trainer, "_evaluate", signalled)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run", config(), **QUIET)
    assert RunFolder.open(tmp_path / "run").result["steps"] == 6


def test_a_changed_byte_is_found(tmp_path):
    run = tmp_path / "run"
    train(run, config(), **QUIET)
    whole = checkpoints(run)[-1].read_bytes()
    (run / "result.json").unlink()
    content = bytearray(whole)
    content[-20] ^= 1
    checkpoints(run)[-1].write_bytes(content)
    train(run, **QUIET)  # from the older one, with the same end
    assert checkpoints(run)[-1].read_bytes() == whole
    for path in checkpoints(run):
        path.write_bytes(content)
    (run / "result.json").unlink()
    with pytest.raises(ValueError, match="its SHA-256 is not the one in its header"):
        train(run, **QUIET)


def test_files_that_were_exchanged_or_damaged(tmp_path):
    run = tmp_path / "run"
    train(run, config(), **QUIET)
    (run / "environment.json").write_text("{")
    (run / "result.json").write_text("{}")
    with pytest.raises(ValueError, match=r"result.json is damaged: remove it and `dlrnn train"):
        train(run, **QUIET)
    (run / "result.json").unlink()
    assert train(run, **QUIET)["steps"] == 6, "no run needs its environment"
    (run / "result.json").unlink()
    for path in checkpoints(run):
        path.write_bytes((run / "best.safetensors").read_bytes())
    with pytest.raises(ValueError, match="its header has an unknown key 'metric'"):
        train(run, **QUIET)


def test_a_full_disk_names_the_file(tmp_path, monkeypatch):
    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: .*a\.json"):
        write_whole(tmp_path / "a.json", json.dumps({}).encode())
    assert list(tmp_path.iterdir()) == []
