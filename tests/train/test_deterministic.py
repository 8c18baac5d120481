"""`--deterministic`: PyTorch's mode lasts as long as a run, and results repeat exactly."""

from dataclasses import replace

import pytest
import torch
from runs import EVERY, QUIET, assert_resumes_exactly
from support import DEVICE
from torch.utils import deterministic as memory

from dlrnn.models import ModelConfig
from dlrnn.train import RunConfig, TaskConfig, train
from dlrnn.train.distributed import deterministic
from dlrnn.train.step import TrainingStep

RUN = RunConfig(
    TaskConfig("shift", {"length": 512}),
    ModelConfig("attention", {"heads": 2}, d_model=32),
    **{"steps": 40, "batch_size": 8, "precision": "bf16", "deterministic": True, **EVERY},
)


def mode():
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        memory.fill_uninitialized_memory,
    )


@pytest.fixture(params=[(False, False, True), (True, True, True), (True, True, False)])
def before(request):
    """Modes that a user may have set; the tests themselves use the strict one."""
    enabled, warns, fills = request.param
    torch.use_deterministic_algorithms(enabled, warn_only=warns)
    memory.fill_uninitialized_memory = fills
    yield request.param
    memory.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)


def test_the_mode_lasts_as_long_as_the_context(before):
    with deterministic(enable=False):
        assert mode() == before
    with deterministic(enable=True):
        assert mode() == (True, False, False)
        with deterministic(enable=True):
            assert mode() == (True, False, False)
        assert mode() == (True, False, False)
    assert mode() == before
    with pytest.raises(KeyError), deterministic(enable=True):
        raise KeyError
    assert mode() == before


def test_the_strict_mode_of_the_user_stays():
    with deterministic(enable=True):
        assert mode() == (True, False, True), "new memory is filled, as was asked"
    assert mode() == (True, False, True)


def test_an_operation_without_a_deterministic_kernel_is_named(before):
    operation = "put_ does not have a deterministic implementation: train without --determ"
    with pytest.raises(ValueError, match=operation), deterministic(enable=True):
        torch.zeros(3).put_(torch.zeros(1, dtype=torch.long), torch.ones(1))
    late = "used cuBLAS before a deterministic run: set CUBLAS_WORKSPACE_CONFIG=:4096:8 before"
    with pytest.raises(ValueError, match=late), deterministic(enable=True):
        raise RuntimeError("you must set CUBLAS_WORKSPACE_CONFIG=:4096:8, says PyTorch")
    with pytest.raises(RuntimeError, match=r"^other$"), deterministic(enable=True):
        raise RuntimeError("other")
    assert mode() == before


@pytest.mark.filterwarnings("ignore:.*defaults to a non-deterministic algorithm:UserWarning")
@pytest.mark.parametrize("wanted", [True, False])
def test_every_step_of_a_run_has_the_mode(wanted, before, tmp_path, monkeypatch):
    original, seen = TrainingStep.__call__, set()

    def step(self, *arguments):
        seen.add(mode())
        original(self, *arguments)

    monkeypatch.setattr(TrainingStep, "__call__", step)
    train(tmp_path / "run", replace(RUN, steps=3, deterministic=wanted), **QUIET)
    assert seen == {(True, False, False) if wanted else before}
    assert mode() == before


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device: make test-gpu")
@pytest.mark.usefixtures("before")
def test_attention_resumes_exactly(tmp_path):
    """In bf16 on a GPU gradients are otherwise added in the order in which blocks finish."""
    assert_resumes_exactly(tmp_path, RUN, 30)
