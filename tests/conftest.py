"""For every test: fixed seeds, one device, uninitialised memory full of NaN."""

import os

import hypothesis
import pytest
import torch
from support import DEVICE

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic mode needs it on a GPU
hypothesis.settings.register_profile("dlrnn", deadline=None, max_examples=30, derandomize=True)
hypothesis.settings.load_profile("dlrnn")
if DEVICE.type == "cpu":  # here, so that it holds for fixtures of a module, too
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items):
    """Tests marked `gpu` are skipped on a CPU."""
    if DEVICE.type != "cuda":
        skip = pytest.mark.skip(reason="needs a CUDA device: make test-gpu")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)


@pytest.fixture(autouse=True)
def reproducible():
    """In deterministic mode `torch.empty` gives NaN, so that an unwritten entry is noticed."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3, device=DEVICE).isnan().all(), "uninitialised memory is not poisoned"
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def unchecked(monkeypatch):
    """Without the shape checker that only tests install: what a user sees."""
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)
