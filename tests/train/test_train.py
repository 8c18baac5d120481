"""The training loop: learning, accumulation, gradients, checks before a run begins."""

import gc
import math
import weakref
from contextlib import suppress
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from runs import QUIET, Own, assert_same_run, config, make, own_mixer, refused, stopped, weights
from support import DEVICE, assert_close
from torch import nn
from torch.utils.checkpoint import checkpoint

from dlrnn.models import build_model
from dlrnn.nn import DLR, reuse_kernels
from dlrnn.train import RunDirectory, TaskConfig, train
from dlrnn.train.checkpoint import checkpoints, read_checkpoint
from dlrnn.train.step import make_step


def test_a_run_learns_and_is_complete(tmp_path):
    result = train(tmp_path / "run", config(steps=300, eval_every=100), **QUIET)
    assert result["best"] > 0.9
    records = RunDirectory.open(tmp_path / "run").records()
    losses = [r["loss"] for r in records if r["split"] == "train"]
    assert losses[-1] < 0.2 * losses[0]
    assert [r["step"] for r in records if r["split"] == "validation"] == [100, 200, 300]
    assert len(checkpoints(tmp_path / "run")) == 2
    assert result["parameters"] == sum(
        p.numel() for p in build_model(config().model, d_input=3, d_output=8).parameters()
    )
    assert train(tmp_path / "run", **QUIET) == result, "a run that is complete is not run again"


def test_missing_data_raise_before_a_folder_is_made(tmp_path, monkeypatch):
    refused(tmp_path / "run", "text is real data", config(task=TaskConfig("text", {"length": 16})))

    def count(self, split):
        if split == "validation":
            raise ValueError("no validation samples")

    monkeypatch.setattr(type(config().make_task()), "count", count)
    refused(tmp_path / "run", "no validation samples", config())


def test_accumulation_equals_the_whole_batch(tmp_path):
    for parts in (1, 4):
        train(tmp_path / str(parts), config(accumulate=parts), **QUIET)
    one, four = weights(tmp_path / "1"), weights(tmp_path / "4")
    for name, value in one.items():
        if name.startswith("model."):
            assert_close(four[name], value, 1e-4)


def test_reused_kernels_are_computed_once(monkeypatch):
    layer, calls = DLR(3, 4).double(), []
    original = DLR._kernel
    counted = lambda self, length: calls.append(1) or original(self, length)  # noqa: E731
    monkeypatch.setattr(DLR, "_kernel", counted)
    parts = torch.randn(3, 2, 10, 3, dtype=torch.float64)
    layer(parts.flatten(0, 1)).square().sum().backward()
    expected = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    calls.clear()
    with reuse_kernels(layer):
        for part in parts:
            layer(part).square().sum().backward()
    assert len(calls) == 1
    for parameter, grad in zip(layer.parameters(), expected, strict=True):
        assert_close(parameter.grad, grad, 1e-12)
    layer(parts[0])
    assert len(calls) == 2, "outside, a kernel is computed each time"
    layer.zero_grad()
    with reuse_kernels(layer):
        for part in parts:
            with torch.no_grad():
                layer(part)  # a metric, say
            y = checkpoint(layer, part.clone().requires_grad_(), use_reentrant=True)
            y.square().sum().backward()
    for parameter, grad in zip(layer.parameters(), expected, strict=True):
        assert_close(parameter.grad, grad, 1e-12)


def test_a_gradient_that_reuse_would_lose_raises():
    layer, x = DLR(3, 4), torch.randn(1, 5, 3)
    with reuse_kernels(layer):
        late = layer(x).sum()
        with pytest.raises(ValueError, match="entered twice"), reuse_kernels(layer):
            pass
        assert layer.reused, "the outer one goes on"
    with pytest.raises(ValueError, match="after reuse_kernels closed"):
        late.backward()
    with suppress(ZeroDivisionError), reuse_kernels(layer):
        layer(x).sum().backward()
        raise ZeroDivisionError
    assert layer.reused is None
    assert layer.W.grad is None, "what broke off adds nothing"


def test_reused_kernels_are_freed_at_once():
    """Not when Python next looks for cycles: they may be gigabytes."""
    layer, x, kept = DLR(3, 4), torch.randn(1, 5, 3), []
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            with reuse_kernels(layer):
                layer(x).sum().backward()
                kept.append(weakref.ref(layer.reused[5].kernel))
        assert kept[-1]() is None
    finally:
        gc.enable()


def test_frozen_kernels_are_reused_without_gradients():
    layer = DLR(3, 4)
    for name in layer.kernel_parameters:
        getattr(layer, name).requires_grad_(False)
    with reuse_kernels(layer):
        assert not layer.kernel(5).requires_grad


def test_kernel_parameters_have_their_own_rate_and_no_decay(tmp_path):
    """With a rate near 0 kernel parameters stay as they were."""
    before = make(config())
    train(tmp_path / "a", config(kernel_lr=1e-12, weight_decay=0.5), **QUIET)
    after = weights(tmp_path / "a")
    for name, value in before.state_dict().items():
        moved = (after[f"model.{name}"] - value).abs().max().item()
        kernel = name.split(".")[-1] in DLR.kernel_parameters
        assert (moved < 1e-9) == kernel, name


def test_clipping_limits_the_norm_of_the_gradient(tmp_path):
    norms = []
    for name, clip in (("clipped", 1e-9), ("free", None)):
        train(tmp_path / name, config(steps=1, clip=clip), **QUIET)
        moments = [v.flatten() for k, v in weights(tmp_path / name).items() if "exp_avg" in k[-7:]]
        norms.append(torch.cat(moments).norm().item())
    assert norms[0] == pytest.approx(1e-10, rel=1e-3), "exp_avg is a tenth of the gradient"
    assert norms[1] > 1e-6


class Exploding(nn.Module):
    """A mixer whose gradient is not finite from its third forward on."""

    from_call = 3

    def __init__(self, d_model):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d_model))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * self.weight * (math.inf if self.calls >= self.from_call else 1)


def test_nan_names_the_parameter_and_the_step(tmp_path, monkeypatch):
    run = own_mixer(Exploding, checkpoint_every=2)
    with pytest.raises(FloatingPointError, match=r"step 3: the gradient of .*weight is not finite"):
        train(tmp_path / "run", run, **QUIET)
    assert [p.name for p in checkpoints(tmp_path / "run")] == ["step-000000002.safetensors"]
    monkeypatch.setattr(Exploding, "from_call", 1)
    with pytest.raises(FloatingPointError, match=r"step 1: .*finite, in the first step"):
        train(tmp_path / "at once", run, **QUIET)


class Lazy(nn.Module):
    """A mixer with a frozen parameter, an unused one, and dropout."""

    def __init__(self, d_model):
        super().__init__()
        self.used = nn.Parameter(torch.ones(d_model))
        self.unused = nn.Parameter(torch.ones(d_model))
        self.frozen = nn.Parameter(torch.ones(d_model), requires_grad=False)

    def forward(self, x):
        return torch.nn.functional.dropout(x * self.used * self.frozen, 0.3, self.training)


def test_unused_parameters_and_dropout_resume_exactly(tmp_path):
    run = own_mixer(Lazy)
    train(tmp_path / "whole", run, **QUIET)
    _, newest = stopped(tmp_path / "run", run)
    newest.unlink()  # killed between two checkpoints
    with pytest.raises(ValueError, match=r"Lazy.*--trust"):
        train(tmp_path / "run", **QUIET)
    train(tmp_path / "run", trust=True, **QUIET)
    assert_same_run(tmp_path / "run", tmp_path / "whole")
    train(tmp_path / "other", own_mixer(Lazy, seed=1), **QUIET)
    records = [(tmp_path / n / "records.jsonl").read_bytes() for n in ("other", "whole")]
    assert records[0] != records[1]


def test_divergence_names_the_step_and_leaves_only_finite_checkpoints(tmp_path):
    every = {"log_every": 50, "checkpoint_every": 1}
    deep = replace(config().model, layers=2)
    for name, steps, model, sentence in (
        ("loss", 8, config().model, r"step \d+: the gradient of .* is not finite"),
        ("input", 40, deep, r"^step \d+: the run has diverged \(x holds nan .*\), .* smaller --lr"),
    ):
        run = config(lr=1e30, steps=steps, model=model, **every)
        with pytest.raises(FloatingPointError, match=sentence):
            train(tmp_path / name, run, **QUIET)
        assert checkpoints(tmp_path / name)
        for path in checkpoints(tmp_path / name):
            assert all(value.isfinite().all() for value in read_checkpoint(path)[0].values())


def test_progress_shows_the_last_step_once(tmp_path, capsys):
    train(tmp_path / "run", config(), **{**QUIET, "show": True})
    lines = [line for line in capsys.readouterr().err.splitlines() if "12/12" in line]
    assert len(lines) == 1
    assert "loss" in lines[0]
    assert "R2" in lines[0]


class Rotating(nn.Module):
    """A mixer with a complex parameter."""

    def __init__(self, d_model):
        super().__init__()
        self.lam = nn.Parameter(torch.full((d_model,), 0.5 + 0.1j))

    def forward(self, x):
        return (x * self.lam).real


class Remembering(Own):
    """A mixer whose state holds something other than tensors."""

    def get_extra_state(self):
        return {"a": 1}

    def set_extra_state(self, state):
        pass


class Counting(Own):
    """A mixer with a buffer that forward replaces."""

    def __init__(self, d_model):
        super().__init__(d_model)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen = self.seen + 1
        return super().forward(x)


def test_a_run_that_cannot_be_kept_makes_no_folder(tmp_path):
    refused(tmp_path / "run", "writer must be one of", config(), writer="x")
    sentence = r"checkpoints hold tensors, and blocks.0.mixer._extra_state of the model is a dict"
    refused(tmp_path / "run", sentence, own_mixer(Remembering))


def test_complex_parameters_train_on_a_device_with_a_number(tmp_path):
    where = {**QUIET, "device": f"{DEVICE.type}:0"}
    assert train(tmp_path / "run", own_mixer(Rotating), **where)["steps"] == 12


def test_a_replaced_buffer_is_averaged_over_processes(monkeypatch):
    step = make_step(own_mixer(Counting), torch.device("cpu"))
    several = Mock(wraps=step.fabric, world_size=2)
    several.all_reduce = lambda value, reduce_op: value + (10 if reduce_op == "mean" else 0)
    monkeypatch.setattr(step, "fabric", several)
    step._update(None)
    (seen,) = step.model.buffers()
    assert seen == 11, "its own 1, and what the others add"
