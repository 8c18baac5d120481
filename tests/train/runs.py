"""Small runs, and what tests do to them."""

from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from support import DEVICE
from torch import nn

from dlrnn.models import LanguageConfig, ModelConfig
from dlrnn.train import RunConfig, TaskConfig, make_model, train
from dlrnn.train.checkpoint import checkpoints, read_checkpoint
from dlrnn.train.step import TrainingStep

QUIET = {"device": DEVICE.type, "show": False, "writer": "none"}

TEXTS = {"order": "1", "name": "null", "pair": "x: y", "rate": "1e-3", "deep": {"a": "2"}}
"""Options of `Own` that JSON or YAML could read as something other than text."""


def config(**changes):
    """A run of 12 steps with checkpoints at 4, 8, 12 and evaluations at 6, 12."""
    settings = {
        "task": TaskConfig("shift", {"length": 16}),
        "model": ModelConfig("dlr", {"d_state": 16, "dt_min": 0.01, "dt_max": 0.01}, d_model=16),
        **{"steps": 12, "batch_size": 4, "lr": 1e-2},
        **{"log_every": 4, "eval_every": 6, "eval_batches": 2, "checkpoint_every": 4},
    }
    return RunConfig(**{**settings, **changes})


def own_mixer(mixer, options=None, **changes):
    """A run with a mixer of a test module."""
    model = ModelConfig(f"{mixer.__module__}.{mixer.__name__}", options or {}, d_model=8)
    return config(model=model, **changes)


class Own(nn.Module):
    """A user's mixer with options of any type."""

    def __init__(self, d_model, order=1, name=None, pair=None, rate=None, deep=None):
        super().__init__()
        self.linear, self.order = nn.Linear(d_model, d_model), order

    def forward(self, x):
        return self.linear(x)


def weights(path):
    """The tensors of the newest checkpoint."""
    return read_checkpoint(checkpoints(path)[-1])[0]


def make(run):
    return make_model(run, run.make_task())


def refused(path, sentence, run=None, **options):
    """Training raises a ValueError with this sentence; a new run makes no folder."""
    before = path.exists()
    with pytest.raises(ValueError, match=sentence):
        train(path, run, **{**QUIET, **options})
    assert path.exists() == before


def stopped(path, run):
    """Train a run, and make it one that was killed before its end; its checkpoints."""
    train(path, run, **QUIET)
    return unfinished(path)


def unfinished(path):
    """Make a complete run one that was killed right before its end; its checkpoints."""
    (path / "result.json").unlink()
    return checkpoints(path)


@contextmanager
def fails_at(step, error=KeyboardInterrupt):
    """Training inside raises `error` before update `step`."""
    original = TrainingStep.__call__

    def failing(self, k, batches):
        if k == step:
            raise error
        original(self, k, batches)

    with patch.object(TrainingStep, "__call__", failing), pytest.raises(error):
        yield


EVERY = {"log_every": 5, "eval_every": 20, "eval_batches": 2, "checkpoint_every": 10}
TINY_LANGUAGE = LanguageConfig(
    **{"layers": 1, "d_model": 16, "d_state": 8, "d_embedding": 8, "d_ff": 16, "vocabulary": 32},
    **{"experts": 4, "dt_min": 0.05, "dt_max": 0.5, "kernel_length": 32},
)


def language_run(books, **settings):
    """A run of a small language model on `tiny_books`."""
    task = TaskConfig("pg19", {"length": 32, "folder": str(books)})
    return RunConfig(task, **{"model": TINY_LANGUAGE, "batch_size": 4, "lr": 1e-2, **settings})


def assert_same_files(one, two, names):
    for name in names:
        assert (one / name).read_bytes() == (two / name).read_bytes(), name


def assert_resumes_exactly(folder, run, step, **options):
    """A run that was killed before a step and resumed has the files of one that was not."""
    options = {**QUIET, **options}
    train(folder / "whole", run, **options)
    with fails_at(step):
        train(folder / "broken", run, **options)
    train(folder / "broken", **options)
    assert_same_run(folder / "whole", folder / "broken")


def assert_same_run(one, two):
    """Two complete runs have the same checkpoints, best model and records."""
    names = {path.name for path in one.glob("*.safetensors")}
    assert len(names) == 3
    assert_same_files(one, two, (*names, "records.jsonl", "config.json"))


def assert_same_weights(one, two):
    first, second = weights(one), weights(two)
    assert first.keys() == second.keys()
    assert all(torch.equal(value, second[name]) for name, value in first.items())
