"""On a GPU the step is a captured graph: same losses as eager PyTorch, exact resume."""

import threading
from dataclasses import replace

import pytest
import torch
from runs import EVERY, QUIET, assert_resumes_exactly
from support import DEVICE

from dlrnn.models import ModelConfig
from dlrnn.train import RunConfig, RunDirectory, TaskConfig, train
from dlrnn.train.step import TrainingStep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device: make test-gpu"),
]

MODEL = ModelConfig("dlr", {"d_state": 64}, d_model=32)
RUNS = {
    "made on the device": RunConfig(
        TaskConfig("shift", {"length": 64}), MODEL, accumulate=2, schedule="cosine", warmup=5
    ),
    "with dropout": RunConfig(
        TaskConfig("shift", {"length": 64}),
        ModelConfig("dlr", {"d_state": 64, "dropout": 0.2}, d_model=32),
    ),
    "from the host": RunConfig(TaskConfig("listops-subtrees", {"length": 128}), MODEL, clip=1.0),
}


def run_of(name):
    return replace(RUNS[name], steps=40, batch_size=8, **EVERY)


@pytest.mark.parametrize("name", RUNS)
def test_a_captured_step_equals_an_eager_one(name, tmp_path, monkeypatch):
    train(tmp_path / "captured", run_of(name), **QUIET)
    original = TrainingStep.__init__

    def eager(self, *arguments):
        original(self, *arguments)
        self._capture = False

    monkeypatch.setattr(TrainingStep, "__init__", eager)
    train(tmp_path / "eager", run_of(name), **QUIET)
    records = [RunDirectory.open(tmp_path / kind).records() for kind in ("captured", "eager")]
    for a, b in zip(*records, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-4)


@pytest.mark.parametrize("name", RUNS)
def test_resume_is_exact(name, tmp_path):
    assert_resumes_exactly(tmp_path, run_of(name), 25)


def test_batches_may_be_copied_during_a_capture(tmp_path, monkeypatch):
    """Prefetching threads copy batches at any time."""
    done = threading.Event()

    def copies():
        while not done.is_set():
            torch.ones(1000).to(DEVICE).cpu()

    thread = threading.Thread(target=copies)
    thread.start()
    try:
        train(tmp_path / "run", run_of("from the host"), **QUIET)
    finally:
        done.set()
        thread.join()
