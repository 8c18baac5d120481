"""`--deterministic`: PyTorch's mode for the time of a run, and the same bits twice."""

import hashlib
import json
from dataclasses import replace

import pytest
import torch
from support import DEVICE
from torch.utils import deterministic as memory

from dlrnn.models import ModelConfig
from dlrnn.paper import recipes
from dlrnn.paper.runs import changed_path
from dlrnn.train import RunConfig, TaskConfig, from_json, train, with_overrides
from dlrnn.train.checkpoint import checkpoints
from dlrnn.train.deterministic import deterministic
from dlrnn.train.step import TrainingStep

QUIET = {"device": DEVICE.type, "show": False, "writer": "none"}
EVERY = {"log_every": 5, "eval_every": 20, "eval_batches": 2, "checkpoint_every": 10}
RUN = RunConfig(
    TaskConfig("shift", {"length": 512}),
    ModelConfig("attention", {"heads": 2}, d_model=32),
    steps=40,
    batch_size=8,
    precision="bf16",
    deterministic=True,
    **EVERY,
)


def mode():
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        memory.fill_uninitialized_memory,
    )


@pytest.fixture(params=[(False, False, True), (True, True, True), (True, True, False)])
def before(request):
    """What a user may have set; the tests' own surroundings are strict."""
    enabled, warns, fills = request.param
    torch.use_deterministic_algorithms(enabled, warn_only=warns)
    memory.fill_uninitialized_memory = fills
    yield request.param
    memory.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)


def test_the_mode_lasts_as_long_as_it_is_wanted(before):
    with deterministic(wanted=False):
        assert mode() == before
    with deterministic(wanted=True):
        assert mode() == (True, False, False)
        with deterministic(wanted=True):
            assert mode() == (True, False, False)
        assert mode() == (True, False, False)
    assert mode() == before
    with pytest.raises(KeyError), deterministic(wanted=True):
        raise KeyError
    assert mode() == before


def test_who_is_strict_already_stays_so():
    with deterministic(wanted=True):
        assert mode() == (True, False, True), "new memory is filled, as was asked"
    assert mode() == (True, False, True)


def test_an_operation_that_cannot_is_named(before):
    operation = "put_ does not have a deterministic implementation: train without --determ"
    with pytest.raises(ValueError, match=operation), deterministic(wanted=True):
        torch.zeros(3).put_(torch.zeros(1, dtype=torch.long), torch.ones(1))
    late = "used cuBLAS before a deterministic run: set CUBLAS_WORKSPACE_CONFIG=:4096:8 before"
    with pytest.raises(ValueError, match=late), deterministic(wanted=True):
        raise RuntimeError("you must set CUBLAS_WORKSPACE_CONFIG=:4096:8, says PyTorch")
    with pytest.raises(RuntimeError, match=r"^other$"), deterministic(wanted=True):
        raise RuntimeError("other")
    assert mode() == before


@pytest.mark.filterwarnings("ignore:.*defaults to a non-deterministic algorithm:UserWarning")
@pytest.mark.parametrize("wanted", [True, False])
def test_a_run_has_the_mode_from_its_first_step_to_its_end(wanted, before, tmp_path, monkeypatch):
    own, seen = TrainingStep.__call__, set()

    def step(self, *arguments):
        seen.add(mode())
        own(self, *arguments)

    monkeypatch.setattr(TrainingStep, "__call__", step)
    train(tmp_path / "run", replace(RUN, steps=3, deterministic=wanted), **QUIET)
    assert seen == {(True, False, False) if wanted else before}
    assert mode() == before


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device: make test-gpu")
@pytest.mark.usefixtures("before")
def test_attention_is_the_same_twice_and_when_it_is_resumed(tmp_path, monkeypatch):
    """In bf16 on a GPU its gradients are else added in the order in which blocks end."""
    train(tmp_path / "whole", RUN, **QUIET)
    own = TrainingStep.__call__

    def stopped(self, step, batches):
        if step == RUN.steps * 3 // 4:
            raise KeyboardInterrupt
        own(self, step, batches)

    with monkeypatch.context() as patched:
        patched.setattr(TrainingStep, "__call__", stopped)
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path / "broken", RUN, **QUIET)
    train(tmp_path / "broken", **QUIET)
    for path in (*checkpoints(tmp_path / "whole"), tmp_path / "whole" / "records.jsonl"):
        assert path.read_bytes() == (tmp_path / "broken" / path.name).read_bytes(), path.name


def test_runs_of_before_there_was_the_setting_go_on():
    """Their configuration does not name it; digests and folders' names come from what it was."""
    free = replace(RUN, deterministic=False)
    complete = json.loads(free.to_json())
    assert complete.pop("deterministic") is False
    assert free.identity() == complete
    assert from_json(json.dumps(complete)) == from_json(free.to_json()) == free
    assert RUN.identity() == json.loads(RUN.to_json()) == {**complete, "deterministic": True}
    assert from_json(RUN.to_json()) == RUN
    name = changed_path(recipes.get("table1/shift/attention-1"), "runs", "full", free).name
    digest = hashlib.sha256((json.dumps(complete, indent=1) + "\n").encode()).hexdigest()
    assert name == f"seed-0-{digest[:8]}"
    assert with_overrides(free, ["--deterministic", "true"]) == RUN
    assert with_overrides(RUN, ["--deterministic", "false"]) == free


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("wrong", ["yes", 1, None])
def test_it_is_a_flag(wrong):
    with pytest.raises(ValueError, match=f"deterministic must be True or False, not {wrong!r}"):
        replace(RUN, deterministic=wrong)
