"""Signals stop a run after its step, and nothing is lost."""

import os
import signal
import time
from types import SimpleNamespace

import pytest
from lightning_fabric import Fabric
from runs import QUIET, assert_same_run, config

from dlrnn.train import RunDirectory, distributed, train, trainer
from dlrnn.train.checkpoint import checkpoints
from dlrnn.train.step import TrainingStep


def signalled(monkeypatch, number, at=None):
    """Send two signals before one step, or before every step; the list of the steps made."""
    step, made = TrainingStep.__call__, []

    def signalling(self, k, batches):
        if at in (None, k):
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)
        step(self, k, batches)
        made.append(k)

    monkeypatch.setattr(TrainingStep, "__call__", signalling)
    return made


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_between_checkpoints_loses_nothing(tmp_path, monkeypatch, number):
    """The resumed run has the same weights and records. `timeout` sends a signal twice."""
    train(tmp_path / "whole", config(), **QUIET)
    # neither this step nor the one before it is recorded or has a checkpoint
    made = signalled(monkeypatch, number, at=6)
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run", config(), **QUIET)
    assert made[-1] == 6
    assert checkpoints(tmp_path / "run")[-1].name == "step-000000007.safetensors"
    assert signal.getsignal(number) is before
    with monkeypatch.context() as patch:  # only rank zero restores the sum of the losses
        patch.setattr(trainer.Trainer, "run", lambda self: {"sum": self.step.loss_sum.item()})
        assert train(tmp_path / "run", **QUIET)["sum"] > 0
        patch.setattr(Fabric, "is_global_zero", False)
        assert train(tmp_path / "run", **QUIET)["sum"] == 0
    train(tmp_path / "run", **QUIET)
    assert made[-6:] == [6, 7, 8, 9, 10, 11]
    assert_same_run(tmp_path / "whole", tmp_path / "run")


@pytest.mark.parametrize(
    ("number", "after", "at_once"),
    [(signal.SIGINT, 1.9, False), (signal.SIGINT, 2.1, True), (signal.SIGTERM, 60.0, False)],
)
def test_repeated_signals(tmp_path, monkeypatch, number, after, at_once):
    """A second Ctrl-C after two seconds ends the run within its step; other signals do not."""
    made, times = signalled(monkeypatch, number), [0.0, after]
    clock = SimpleNamespace(monotonic=lambda: times.pop(0), sleep=lambda _: None)
    monkeypatch.setattr(distributed, "time", clock)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run", config(), **QUIET)
    assert len(made) == len(checkpoints(tmp_path / "run")) == (0 if at_once else 1)


def test_the_handler_waits_for_the_second_signal_of_a_pair(monkeypatch):
    """Otherwise the second one would be handled after a long operation, as a new request."""
    waited = []

    def second(seconds):
        waited.append(seconds)
        os.kill(os.getpid(), signal.SIGINT)

    clock = SimpleNamespace(monotonic=time.monotonic, sleep=second)
    monkeypatch.setattr(distributed, "time", clock)
    with distributed.stop_requests() as asked:
        os.kill(os.getpid(), signal.SIGINT)
    assert waited == [distributed.PAIR_SECONDS]
    assert len(asked) == 2


def test_signals_are_handled_until_writers_are_closed(tmp_path, monkeypatch):
    """A signal while a writer closes does not end the process."""
    closed = []

    class Slow:
        def add_scalar(self, *_):
            os.kill(os.getpid(), signal.SIGTERM)

        def close(self):
            os.kill(os.getpid(), signal.SIGTERM)
            closed.append(1)

    monkeypatch.setattr(trainer, "open_writer", lambda *_: Slow())
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run", config(), **QUIET)
    assert closed
    assert checkpoints(tmp_path / "run")


def test_a_signal_at_the_last_step_is_not_lost(tmp_path, monkeypatch):
    """The run is complete, and train() raises, so that its caller starts no other run."""
    original = trainer.Trainer._evaluate

    def signalled(self, step):
        original(self, step)
        if step == self.config.steps:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(trainer.Trainer, "_evaluate", signalled)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run", config(), **QUIET)
    assert RunDirectory.open(tmp_path / "run").result["steps"] == 12
