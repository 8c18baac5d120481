"""The loop: it learns, it accumulates, it says what is wrong."""

import gc
import importlib
import json
import math
import os
import signal
import subprocess
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from lightning_fabric import Fabric
from support import DEVICE, assert_close
from torch import nn
from torch.utils.checkpoint import checkpoint

from dlrnn.bench.tables import _step
from dlrnn.common.files import write_whole
from dlrnn.models import ModelConfig, build_model
from dlrnn.nn import DLR, held_kernels
from dlrnn.tasks.listops import trees
from dlrnn.tasks.pathfinder import paths, pixels
from dlrnn.train import (
    RunConfig,
    RunFolder,
    TaskConfig,
    from_json,
    interrupt,
    loop,
    make_model,
    plain,
    train,
    with_overrides,
)
from dlrnn.train.ahead import made_ahead, threads_for
from dlrnn.train.checkpoint import checkpoints
from dlrnn.train.evaluate import scores
from dlrnn.train.folder import Lines, checkout
from dlrnn.train.plain import may_stop, plain_level
from dlrnn.train.processes import make_fabric
from dlrnn.train.step import TrainingStep, _processes_here, prefetched

QUIET = {"device": DEVICE.type, "show": False, "writer": "none"}


def config(**changes):
    settings = {
        "task": TaskConfig("shift", {"length": 16}),
        "model": ModelConfig("dlr", {"d_state": 16, "dt_min": 0.01, "dt_max": 0.01}, d_model=16),
        "steps": 12,
        "batch_size": 4,
        "lr": 1e-2,
        "log_every": 4,
        "eval_every": 6,
        "eval_batches": 2,
        "checkpoint_every": 4,
    }
    return RunConfig(**{**settings, **changes})


def weights(path):
    from dlrnn.train.checkpoint import read

    return read(checkpoints(path)[-1])[0]


def test_every_sequence_counts_the_same():
    """The last batch of a set may be smaller."""
    task = config().make_task()
    model = make_model(config(), task).to(DEVICE)
    large, small = (task.sample(n, split="test", step=0, device=DEVICE) for n in (7, 2))
    one, other = scores(model, task, iter([large])), scores(model, task, iter([small]))
    both = scores(model, task, iter([large, small]))
    assert both == pytest.approx({name: (7 * one[name] + 2 * other[name]) / 9 for name in one})


def test_nothing_is_dropped_in_an_evaluation():
    run = config(model=ModelConfig("dlr", {"d_state": 4, "dropout": 0.5}, d_model=16))
    task = run.make_task()
    model = make_model(run, task).to(DEVICE).train()
    batch = task.sample(8, split="validation", device=DEVICE)
    found = scores(model, task, iter([batch]))
    assert model.training, "as it was"
    assert found == scores(model, task, iter([batch])) == scores(model.eval(), task, iter([batch]))
    assert not model.training, "as it was"


@pytest.mark.parametrize("threads", [1, 3])
def test_batches_of_the_host_come_in_their_order(threads, monkeypatch):
    monkeypatch.setattr("dlrnn.train.step.threads_for", lambda *_: threads)
    task = TaskConfig("pathfinder-segmentation", {"resolution": 32})
    asked = config(task=task, model=ModelConfig("dlr", {"d_state": 4, "bidirectional": True}))
    step = _step(asked, torch.device("cpu"))
    for k, batches in enumerate(prefetched(step, 5, 17), start=5):
        for one, other in zip(batches, step.samples(k), strict=True):
            assert torch.equal(one.inputs, other.inputs)
    assert k == 16


def test_a_model_on_the_cpu_leaves_half_of_the_cores(monkeypatch):
    alone = {(2, "cpu", 1): 1, (16, "cpu", 1): 8, (2, "cuda", 1): 1, (16, "cuda", 1): 14}
    several = {(64, "cuda", 1): 16, (128, "cuda", 8): 14, (16, "cuda", 8): 1, (8, "cpu", 2): 2}
    for (cores, device, processes), threads in (alone | several).items():
        monkeypatch.setattr(os, "sched_getaffinity", Mock(return_value=range(cores)), raising=False)
        assert threads_for(torch.device(device), processes) == threads


def test_the_cores_are_shared_by_the_processes_of_a_machine():
    several = Mock(parallel_devices=[torch.device("cpu")] * 8)
    assert _processes_here(Mock(strategy=several)) == 8
    assert _processes_here(make_fabric(DEVICE.type, "fp32")) == 1


@pytest.mark.parametrize("threads", [1, 3])
def test_ahead_but_not_far_and_nothing_in_vain(threads):
    begun = []

    def make(number):
        begun.append(number)
        if number == 30:
            raise ValueError("a sample that cannot be")
        return 10 * number

    made = made_ahead(make, range(5, 100, 5), threads)
    assert [next(made), next(made)] == [50, 100]
    assert max(begun) <= 5 * (1 + threads + 2 + 1)
    made.close()
    known = len(begun)
    assert list(made) == []
    assert len(begun) == known, "the rest is not made"
    with pytest.raises(ValueError, match="a sample that cannot be"):
        list(made_ahead(make, range(5, 100, 5), threads))
    assert list(made_ahead(make, range(0), threads)) == []


def test_threads_draw_at_once():
    for kernel in (paths.draw, pixels.paint, trees.draw):
        assert kernel.targetoptions["nogil"]


def test_it_learns(tmp_path):
    result = train(tmp_path / "run", config(steps=300, eval_every=100), **QUIET)
    assert result["best"] > 0.9
    records = RunFolder.open(tmp_path / "run").records()
    losses = [r["loss"] for r in records if r["split"] == "train"]
    assert losses[-1] < 0.2 * losses[0]
    assert [r["step"] for r in records if r["split"] == "validation"] == [100, 200, 300]
    assert len(checkpoints(tmp_path / "run")) == 2
    assert result["parameters"] == sum(
        p.numel() for p in build_model(config().model, d_input=3, d_output=8).parameters()
    )
    assert train(tmp_path / "run", **QUIET) == result, "a run that is complete is not run again"


def test_what_is_plain_may_stop():
    ones, noughts = [(k, 0.995) for k in range(1, 9)], [(k, 0.001) for k in range(1, 9)]
    assert may_stop(ones, 8, 100)
    assert plain_level(ones, 8) == 1
    assert not may_stop(noughts, 8, 100)
    assert may_stop(noughts, 8, 16)
    assert not may_stop(ones[-2:], 8, 16), "three evaluations at least"
    late = [(4, 0.5), *ones[4:]]
    assert not may_stop(late, 8, 16), "all of the last half"
    assert may_stop([(3, 0.5), *ones[3:]], 8, 16)
    assert not may_stop([*ones[:-1], (8, math.nan)], 8, 16)
    assert may_stop([(step, -0.004) for step, _ in noughts], 8, 16), "below 0 is chance"
    for last in (-0.006, 0.0025):
        assert not may_stop([*noughts[:-1], (8, last)], 8, 16), "it creeps up, or breaks"
    for value in (0.989, 1.001):
        assert not may_stop([(step, value) for step, _ in ones], 8, 16)


def test_a_run_stops_where_it_is_plain(tmp_path, monkeypatch):
    """Killed and gone on with, it stops at the same step with the same weights."""
    run = config(steps=400, eval_every=10, checkpoint_every=40)
    monkeypatch.setattr(plain, "PLAIN", {0: (-0.05, 0.05), 1: (0.95, 1.0)})
    result = train(tmp_path / "run", run, until_plain=True, **QUIET)
    steps = result["steps"]
    assert 30 <= steps < 400
    assert result["stopped"] == "R2 between 0.95 and 1.0 for the last half of them"
    assert RunFolder.open(tmp_path / "run").records()[-1]["step"] == steps
    train(tmp_path / "cut", run, until_plain=True, **QUIET)
    for path in checkpoints(tmp_path / "cut")[1:]:
        path.unlink()
    (tmp_path / "cut" / "result.json").unlink()
    again = train(tmp_path / "cut", until_plain=True, **QUIET)
    assert again["steps"] == steps
    for name, value in weights(tmp_path / "run").items():
        assert torch.equal(value, weights(tmp_path / "cut")[name])
    (tmp_path / "cut" / "result.json").unlink()  # killed right before it was written
    assert train(tmp_path / "cut", until_plain=True, **QUIET)["steps"] == steps
    found = [(tmp_path / run / "records.jsonl").read_text() for run in ("run", "cut")]
    assert found[0] == found[1]
    snapshots = (tmp_path / "run" / "snapshots.jsonl").read_text().splitlines()
    assert json.loads(snapshots[-1])["step"] == steps
    splits = [each["split"] for each in RunFolder(tmp_path / "run").records()]
    assert set(splits[-2:]) == {"train", "validation"}, "its last loss, too"
    whole = train(
        tmp_path / "whole",
        config(steps=steps, eval_every=10, checkpoint_every=40),
        until_plain=True,
        **QUIET,
    )
    assert whole["steps"] == steps
    assert "stopped" not in whole, "plain, and at its end"


def test_a_loss_is_never_plain(tmp_path, monkeypatch):
    """It may rest at 1 and go on falling."""
    monkeypatch.setattr(type(config().make_task()), "less_is_better", True)
    with pytest.raises(ValueError, match="--until-plain is for metrics that end at 1"):
        train(tmp_path / "run", config(), until_plain=True, **QUIET)
    assert not (tmp_path / "run").exists()


def test_data_that_is_missing_ends_a_run_before_it_begins(tmp_path, monkeypatch):
    real = config(task=TaskConfig("text", {"length": 16}))
    with pytest.raises(ValueError, match="text is real data"):
        train(tmp_path / "run", real, **QUIET)

    def count(self, split):
        if split == "validation":
            raise ValueError("no validation samples")

    monkeypatch.setattr(type(config().make_task()), "count", count)
    with pytest.raises(ValueError, match="no validation samples"):
        train(tmp_path / "run", config(), **QUIET)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_between_checkpoints_it_goes_on_where_it_was(tmp_path, monkeypatch, number):
    """After the step, wherever that is; the end is the same, weights and records.

    Also if the signal comes twice, the second time in the midst of the step: as from `timeout`.
    """
    train(tmp_path / "whole", config(), **QUIET)
    step, made = TrainingStep.__call__, []

    def signalled(self, k, batches):
        if k == 6:  # neither logged nor a checkpoint, and the loss before it is not, either
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)
        step(self, k, batches)
        made.append(k)

    monkeypatch.setattr(TrainingStep, "__call__", signalled)
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run", config(), **QUIET)
    assert made[-1] == 6
    assert checkpoints(tmp_path / "run")[-1].name == "step-000000007.safetensors"
    assert signal.getsignal(number) is before
    with monkeypatch.context() as patch:  # what has been summed up counts once, in any process
        patch.setattr(loop._Run, "go", lambda self: {"sum": self.step.loss_sum.item()})
        assert train(tmp_path / "run", **QUIET)["sum"] > 0
        patch.setattr(Fabric, "is_global_zero", False)
        assert train(tmp_path / "run", **QUIET)["sum"] == 0
    train(tmp_path / "run", **QUIET)
    assert made[-6:] == [6, 7, 8, 9, 10, 11]
    one, other = weights(tmp_path / "whole"), weights(tmp_path / "run")
    assert all(torch.equal(one[name], other[name]) for name in one)
    records = [(tmp_path / name / "records.jsonl").read_bytes() for name in ("whole", "run")]
    assert records[0] == records[1]


@pytest.mark.parametrize(
    ("number", "after", "at_once"),
    [(signal.SIGINT, 1.9, False), (signal.SIGINT, 2.1, True), (signal.SIGTERM, 60.0, False)],
)
def test_asked_again(tmp_path, monkeypatch, number, after, at_once):
    """In the midst of a step: soon it is one wish; later, by Ctrl-C, the step has no end."""
    step, made, times = TrainingStep.__call__, [], [0.0, after]

    def signalled(self, k, batches):
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
        step(self, k, batches)
        made.append(k)

    clock = SimpleNamespace(monotonic=lambda: times.pop(0), sleep=lambda _: None)
    monkeypatch.setattr(interrupt, "time", clock)
    monkeypatch.setattr(TrainingStep, "__call__", signalled)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run", config(), **QUIET)
    assert len(made) == len(checkpoints(tmp_path / "run")) == (0 if at_once else 1)


def test_it_waits_for_the_second_signal_of_a_pair(monkeypatch):
    """Else that were noted when a long operation ends, and taken for a second wish."""
    waited = []

    def second(seconds):
        waited.append(seconds)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(interrupt, "time", SimpleNamespace(monotonic=time.monotonic, sleep=second))
    with interrupt.asked_to_stop() as asked:
        os.kill(os.getpid(), signal.SIGINT)
    assert waited == [interrupt.TWIN]
    assert len(asked) == 2


def test_it_listens_until_all_is_closed(tmp_path, monkeypatch):
    """What comes once more while a writer closes does not end the process."""
    closed = []

    class Slow:
        def add_scalar(self, *_):
            os.kill(os.getpid(), signal.SIGTERM)

        def close(self):
            os.kill(os.getpid(), signal.SIGTERM)
            closed.append(1)

    monkeypatch.setattr(loop, "open_writer", lambda *_: Slow())
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run", config(), **QUIET)
    assert closed
    assert checkpoints(tmp_path / "run")


def test_accumulation_is_the_whole_batch(tmp_path):
    for parts in (1, 4):
        train(tmp_path / str(parts), config(accumulate=parts), **QUIET)
    one, four = weights(tmp_path / "1"), weights(tmp_path / "4")
    for name, value in one.items():
        if name.startswith("model."):
            assert_close(four[name], value, 1e-4)


def test_held_kernels_are_computed_once(monkeypatch):
    layer, calls = DLR(3, 4).double(), []
    own = DLR._kernel
    monkeypatch.setattr(DLR, "_kernel", lambda self, length: calls.append(1) or own(self, length))
    parts = torch.randn(3, 2, 10, 3, dtype=torch.float64)
    layer(parts.flatten(0, 1)).square().sum().backward()
    expected = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    calls.clear()
    with held_kernels(layer):
        for part in parts:
            layer(part).square().sum().backward()
    assert len(calls) == 1
    for parameter, grad in zip(layer.parameters(), expected, strict=True):
        assert_close(parameter.grad, grad, 1e-12)
    layer(parts[0])
    assert len(calls) == 2, "outside, a kernel is computed each time"
    layer.zero_grad()
    with held_kernels(layer):
        for part in parts:
            with torch.no_grad():
                layer(part)  # a metric, say
            y = checkpoint(layer, part.clone().requires_grad_(), use_reentrant=True)
            y.square().sum().backward()
    for parameter, grad in zip(layer.parameters(), expected, strict=True):
        assert_close(parameter.grad, grad, 1e-12)


def test_held_kernels_lose_no_gradient_without_a_word():
    layer, x = DLR(3, 4), torch.randn(1, 5, 3)
    with held_kernels(layer):
        late = layer(x).sum()
        with (
            pytest.raises(ValueError, match=r"^held_kernels is entered twice"),
            held_kernels(layer),
        ):
            pass
        assert layer.held, "the outer one goes on"
    with pytest.raises(ValueError, match=r"must be called inside held_kernels, not after it"):
        late.backward()
    with pytest.raises(ZeroDivisionError):
        _broken_off(layer, x)
    assert layer.held is None
    assert layer.W.grad is None, "what broke off adds nothing"


def test_held_kernels_are_freed_at_once():
    """Not when Python next looks for cycles: they may be gigabytes."""
    layer, x, kept = DLR(3, 4), torch.randn(1, 5, 3), []
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            with held_kernels(layer):
                layer(x).sum().backward()
                kept.append(weakref.ref(layer.held[5].kernel))
        assert kept[-1]() is None
    finally:
        gc.enable()


def test_frozen_kernels_are_held_without_gradients():
    layer = DLR(3, 4)
    for name in layer.kernel_parameters:
        getattr(layer, name).requires_grad_(False)
    with held_kernels(layer):
        assert not layer.kernel(5).requires_grad


def _broken_off(layer, x):
    with held_kernels(layer):
        layer(x).sum().backward()
        raise ZeroDivisionError


def test_rates():
    constant, cosine = config(warmup=4), config(schedule="cosine", warmup=4)
    assert [constant.rate(k) for k in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]
    assert cosine.rate(4) == 1
    assert cosine.rate(8) == pytest.approx(0.5)
    assert cosine.rate(11) == pytest.approx(0.5 * (1 + math.cos(math.pi * 7 / 8)))
    assert config(schedule="cosine").rate(0) == 1


def test_kernel_rate_and_decay(tmp_path):
    """Kernel parameters have a rate of their own and no decay: with rate ~0 they stay."""
    before = make(config())
    train(tmp_path / "a", config(kernel_lr=1e-12, weight_decay=0.5), **QUIET)
    after = weights(tmp_path / "a")
    for name, value in before.state_dict().items():
        moved = (after[f"model.{name}"] - value).abs().max().item()
        kernel = name.split(".")[-1] in DLR.kernel_parameters
        assert (moved < 1e-9) == kernel, name


def make(run):
    from dlrnn.train import make_model

    return make_model(run, run.make_task())


def test_clipping(tmp_path):
    train(tmp_path / "a", config(steps=1, clip=1e-9), **QUIET)
    train(tmp_path / "b", config(steps=1), **QUIET)
    state_a, state_b = weights(tmp_path / "a"), weights(tmp_path / "b")
    key = "optimizer.encoder.weight.exp_avg"
    norm = (
        torch.cat([v.flatten() for k, v in state_a.items() if k.endswith("exp_avg")]).norm().item()
    )
    assert norm == pytest.approx(1e-10, rel=1e-3), "exp_avg is a tenth of the gradient"
    assert state_b[key].norm() > 1e-6


def test_bf16_runs(tmp_path):
    result = train(tmp_path / "run", config(precision="bf16"), **QUIET)
    assert math.isfinite(result["value"])


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
    import sys
    import types

    module = types.ModuleType("explosive")
    module.Exploding = Exploding
    monkeypatch.setitem(sys.modules, "explosive", module)
    run = config(model=ModelConfig("explosive.Exploding", d_model=8), checkpoint_every=2)
    with pytest.raises(FloatingPointError, match=r"step 3: the gradient of .*weight is not finite"):
        train(tmp_path / "run", run, **QUIET)
    assert [p.name for p in checkpoints(tmp_path / "run")] == ["step-000000002.safetensors"]
    monkeypatch.setattr(Exploding, "from_call", 1)
    with pytest.raises(FloatingPointError, match=r"step 1: .*finite, before anything was learnt"):
        train(tmp_path / "at once", run, **QUIET)


# ---------------------------------------------------------------------------------- configuration


def test_configuration_survives_json():
    run = config(kernel_lr=1e-5, clip=1.0)
    assert from_json(run.to_json()) == run
    with pytest.raises(ValueError, match="stepps"):
        from_json(json.dumps({**json.loads(run.to_json()), "stepps": 3}))
    with pytest.raises(ValueError, match="is not JSON"):
        from_json("{")


def test_overrides():
    run = config()
    changed = with_overrides(
        run,
        ["--steps", "7", "--task.settings.length", "32", "--model.mixer_options.d_state", "5"],
    )
    assert changed.steps == 7
    assert changed.task.settings == {"length": 32}
    assert changed.model.mixer_options == {"d_state": 5, "dt_min": 0.01, "dt_max": 0.01}
    other = with_overrides(run, ["--model.mixer", "attention", "--model.mixer_options.heads", "2"])
    assert other.model.mixer_options == {"heads": 2}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--stpes", "3"], r"there is no setting --stpes: did you mean --steps\?"),
        (["--model.mixxer=dlr"], r"did you mean --model.mixer\?"),
        (["--xyzzy", "3"], "no setting --xyzzy: `dlrnn recipes --show RECIPE` prints them all"),
        (["--steps", "many"], 'key "steps": Expected a .*int'),
        (["--steps", "0"], "steps must be at least 1, not 0"),
        (["--lr", "-1"], "lr must be more than 0 and finite, not -1.0"),
        (["--accumulate", "3"], "batch_size 4 cannot be divided into 3 micro-batches"),
        (["--schedule", "linear"], "Expected a .*constant"),
        (["--model.mixer", "dlrr"], "did you mean 'dlr'"),
        (["--model.mixer_options.d_sate", "3"], "did you mean 'd_state'"),
    ],
)
def test_wrong_overrides(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        with_overrides(config(), arguments)


# ---------------------------------------------------------------------------------- refusing


def refused(path, sentence, run=None, **options):
    with pytest.raises(ValueError, match=sentence):
        train(path, run, **{**QUIET, **options})


def test_folders_are_never_overwritten(tmp_path):
    train(tmp_path / "run", config(), **QUIET)
    before = {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir() if p.is_file()}
    refused(tmp_path / "run", "holds a run that is complete", config())
    (tmp_path / "run" / "result.json").unlink()
    refused(tmp_path / "run", "was stopped; go on with `dlrnn train --resume", config())
    after = {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir() if p.is_file()}
    assert {k: v for k, v in before.items() if k != "result.json"} == after
    refused(tmp_path, "is not empty", config())
    assert [path.name for path in tmp_path.iterdir()] == ["run"], "not even a lock"
    refused(tmp_path / "nothing", "there is no folder")


def test_killed_before_there_was_a_configuration(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "environment.json").write_text("{}")
    (tmp_path / "run" / "config.json.part").write_text("{")
    assert train(tmp_path / "run", config(), **QUIET)["steps"] == 12


def test_a_folder_in_use(tmp_path):
    with RunFolder(tmp_path / "run").locked():
        refused(tmp_path / "run", "is in use by another process", config())
        RunFolder.create(tmp_path / "run", config())
        refused(tmp_path / "run", "is in use by another process")
    assert train(tmp_path / "run", **QUIET)["steps"] == 12


def test_a_run_that_never_trained_may_be_begun_again(tmp_path):
    with RunFolder(tmp_path / "run").locked():
        RunFolder.create(tmp_path / "run", config(steps=99))
    assert train(tmp_path / "run", config(), **QUIET)["steps"] == 12
    assert RunFolder.open(tmp_path / "run").config == config()


class Lazy(nn.Module):
    """A mixer with a parameter that is frozen, one that is never used, and dropout of its own."""

    def __init__(self, d_model):
        super().__init__()
        self.used = nn.Parameter(torch.ones(d_model))
        self.unused = nn.Parameter(torch.ones(d_model))
        self.frozen = nn.Parameter(torch.ones(d_model), requires_grad=False)

    def forward(self, x):
        return torch.nn.functional.dropout(x * self.used * self.frozen, 0.3, self.training)


def test_what_has_no_gradient_and_what_is_random_is_resumed(tmp_path, monkeypatch):
    import sys
    import types

    module = types.ModuleType("lazily")
    module.Lazy = Lazy
    monkeypatch.setitem(sys.modules, "lazily", module)
    run = config(model=ModelConfig("lazily.Lazy", d_model=8))
    train(tmp_path / "whole", run, **QUIET)
    _, newest = stopped(tmp_path / "run", run)
    newest.unlink()  # killed between two checkpoints
    with pytest.raises(ValueError, match=r"lazily.Lazy.*--trust"):
        train(tmp_path / "run", **QUIET)
    train(tmp_path / "run", trust=True, **QUIET)
    for name in (newest.name, "records.jsonl", "best.safetensors"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    other = config(model=ModelConfig("lazily.Lazy", d_model=8), seed=1)
    train(tmp_path / "other", other, **QUIET)
    assert (tmp_path / "other" / "records.jsonl").read_bytes() != (
        tmp_path / "whole" / "records.jsonl"
    ).read_bytes()


def test_the_best_checkpoint_is_that_of_the_best_validation(tmp_path, monkeypatch):
    """Scores by hand: the second of four is the best, and it is the model of that step."""
    from dlrnn.tasks.atomic import Shift
    from dlrnn.train import loop
    from dlrnn.train.checkpoint import read

    given = iter([math.nan, 0.5, 0.2, 0.4, 0.0])
    splits = []
    own, score = loop.held_out, {}

    def watched(task, run, split, *rest):
        splits.append(split)
        score["R2"] = next(given)
        return own(task, run, split, *rest)

    monkeypatch.setattr(loop, "held_out", watched)
    monkeypatch.setattr(
        Shift, "metrics", lambda self, output, batch: {"R2": torch.tensor(score["R2"])}
    )
    result = train(tmp_path / "run", config(eval_every=3), **QUIET)
    assert splits == ["validation"] * 4
    assert (result["best"], result["best_step"]) == (0.5, 6)
    train(tmp_path / "six", config(steps=6, checkpoint_every=6, eval_every=99), **{**QUIET})
    best = read(tmp_path / "run" / "best.safetensors")[0]
    six = weights(tmp_path / "six")
    assert all(torch.equal(value, six[name]) for name, value in best.items())


def test_a_best_model_that_is_not_found_again_stays_the_best(tmp_path, monkeypatch):
    """Step 6 is the best, then it dies; going on from step 4 another device finds less."""
    from dlrnn.tasks.atomic import Shift
    from dlrnn.train.checkpoint import header

    given, own = iter([0.8, 0.9, 0.79, 0.5, 0.5]), TrainingStep.__call__

    def dies(self, step, batches):
        if step == 6:
            raise RuntimeError("a power cut")
        own(self, step, batches)

    def metrics(self, output, batch):
        return {"R2": torch.tensor(next(given))}

    monkeypatch.setattr(Shift, "metrics", metrics)
    run = config(eval_every=3, eval_batches=1)
    with monkeypatch.context() as patch:
        patch.setattr(TrainingStep, "__call__", dies)
        with pytest.raises(RuntimeError, match="a power cut"):
            train(tmp_path / "run", run, **QUIET)
    result = train(tmp_path / "run", **QUIET)
    there = header(tmp_path / "run" / "best.safetensors")
    assert (result["best"], result["best_step"]) == pytest.approx((0.9, 6))
    assert (there["value"], there["step"]) == pytest.approx((0.9, 6))


def test_data_that_change_under_a_run_end_it(tmp_path, monkeypatch):
    digests = iter(["as it began", "as it began", "another"])
    monkeypatch.setattr(type(config().make_task()), "digest", lambda self: next(digests))
    with pytest.raises(ValueError, match="the set of data was changed while the run read it"):
        train(tmp_path / "run", config(), **QUIET)
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["step-000000004.safetensors"]


def test_padding_is_told_to_the_model(tmp_path):
    from dlrnn.train.step import forward

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
def test_losses_of_parts_add_up(name):
    from dlrnn import tasks

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


def test_what_explodes_leaves_no_checkpoint_of_nan(tmp_path):
    run = config(lr=1e30, log_every=50, checkpoint_every=1, steps=8)
    with pytest.raises(FloatingPointError, match="is not finite"):
        train(tmp_path / "run", run, **QUIET)
    assert checkpoints(tmp_path / "run")
    for path in checkpoints(tmp_path / "run"):
        from dlrnn.train.checkpoint import read

        assert all(value.isfinite().all() for value in read(path)[0].values())


def stopped(path, run):
    """A run that was stopped after its first checkpoints."""
    train(path, run, **QUIET)
    (path / "result.json").unlink()
    return checkpoints(path)


def test_a_damaged_checkpoint_is_passed_over(tmp_path):
    whole = train(tmp_path / "whole", config(), **QUIET)
    older, newest = stopped(tmp_path / "run", config())
    newest.write_bytes(newest.read_bytes()[:-100])
    again = train(tmp_path / "run", **QUIET)
    assert again["value"] == whole["value"]
    assert weights(tmp_path / "run").keys() == weights(tmp_path / "whole").keys()
    for name in ("records.jsonl", newest.name, older.name):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_no_good_checkpoint(tmp_path):
    for path in stopped(tmp_path / "run", config()):
        path.write_bytes(b"nonsense")
    refused(tmp_path / "run", "no checkpoint of .* can be read: .* is damaged")


def test_a_checkpoint_of_another_model(tmp_path):
    stopped(tmp_path / "run", config())
    text = (tmp_path / "run" / "config.json").read_text()
    (tmp_path / "run" / "config.json").write_text(text.replace('"d_state": 16', '"d_state": 8'))
    refused(tmp_path / "run", r"is of another model: its .* is \[16\], not \[8\]")


def test_causal_tasks_refuse_bidirectional_mixers(tmp_path):
    both = ModelConfig("dlr", {"d_state": 4, "bidirectional": True}, d_model=4)
    refused(tmp_path / "run", "asks for a model that reads from left to right", config(model=both))


def test_incompatible_sizes(tmp_path):
    refused(
        tmp_path / "run",
        "must be a multiple of the 8 copies",
        config(task=TaskConfig("shift", {"length": 17})),
    )


def test_a_full_disk_loses_nothing(tmp_path, monkeypatch):
    """Writing beside fails: the file of that name stays as it was, nothing half-written is left."""
    import os

    path = tmp_path / "a.bin"
    write_whole(path, b"old")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, b"new and longer")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.bin"]


def test_lines_are_cut_back(tmp_path):
    path = tmp_path / "a.jsonl"
    lines = Lines(path, None)
    lines.append({"a": 1})
    known = lines.length()
    lines.append({"a": 2})
    lines.close()
    with open(path, "ab") as file:
        file.write(b'{"torn')
    again = Lines(path, known)
    again.append({"a": 3})
    again.close()
    assert path.read_text() == '{"a": 1}\n{"a": 3}\n'
    path.write_text('{"a": 1}\n{"torn')
    again = Lines(path, None)
    again.append({"a": 4})
    again.close()
    assert path.read_text() == '{"a": 1}\n{"torn\n{"a": 4}\n', "a line of its own"


def test_records_that_cannot_be_read_are_named(tmp_path):
    path = tmp_path / "records.jsonl"
    first = '{"step": 1, "split": "train", "loss": 0.5}'
    path.write_text(f'{first}\n{{"step": 2, "lo')
    assert RunFolder(tmp_path).records() == [json.loads(first)], "the last was cut"
    for wrong in ("garbage", "[1, 2]", '{"step": 2}', "\N{SNOWMAN}", "[" * 10**5):
        path.write_text(f"{first}\n{wrong}\n")
        with pytest.raises(ValueError, match=r"records.jsonl, line 2, is not a record of a run"):
            RunFolder(tmp_path).records()


def test_what_has_changed_since_is_not_gone_on_with(tmp_path, monkeypatch):
    train(tmp_path / "run", config(), **QUIET)
    (tmp_path / "run" / "result.json").unlink()
    path = tmp_path / "run" / "config.json"
    begun = path.read_text()
    path.write_text(config(steps=20).to_json())
    with pytest.raises(ValueError, match="was begun with another configuration: begin a new run"):
        train(tmp_path / "run", **QUIET)
    path.write_text(begun)
    with monkeypatch.context() as patch:
        patch.setattr(type(config().make_task()), "digest", lambda self: "another")
        with pytest.raises(ValueError, match="was begun with another set of data"):
            train(tmp_path / "run", **QUIET)
    assert train(tmp_path / "run", **QUIET)["steps"] == 12


def test_two_writers_of_one_file(tmp_path):
    """Whoever is last; nobody's is torn."""
    path, contents = tmp_path / "table.md", [bytes([65 + k]) * 200_000 for k in range(4)]

    def write(content):
        for _ in range(10):
            write_whole(path, content)
            assert path.read_bytes() in contents

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, contents))
    assert [each.name for each in tmp_path.iterdir()] == ["table.md"]


def test_a_run_that_goes_on_elsewhere_says_so(tmp_path, monkeypatch):
    folder = importlib.import_module("dlrnn.train.folder")
    train(tmp_path / "run", config(), **QUIET)
    path, here = tmp_path / "run" / "environment.json", folder.environment()
    assert json.loads(path.read_text()) == here
    for place in ("here", "there", "there", "elsewhere"):
        now = here if place == "here" else {**here, "device": place}
        monkeypatch.setattr(folder, "environment", lambda now=now: now)
        (tmp_path / "run" / "result.json").unlink()
        train(tmp_path / "run", **QUIET)
    known = json.loads(path.read_text())
    assert [each["device"] for each in known.pop("then")] == ["there", "elsewhere"]
    assert known == here
    for left in (path.with_name("result.json"), *checkpoints(tmp_path / "run")):
        left.unlink()
    train(tmp_path / "run", **QUIET)
    assert json.loads(path.read_text()) == now, "begun anew: nothing of before is in it"
    timing = path.with_name("timing.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in timing] == [4, 8, 12]


def test_what_is_shown_ends_with_one_line(tmp_path, capsys):
    train(tmp_path / "run", config(), **{**QUIET, "show": True})
    lines = [line for line in capsys.readouterr().err.splitlines() if "12/12" in line]
    assert len(lines) == 1
    assert "loss" in lines[0]
    assert "R2" in lines[0]


def test_a_run_knows_the_commit_of_its_source_and_of_no_other(tmp_path):
    def git(*arguments):
        command = [
            "git",
            "-C",
            str(tmp_path),
            "-c",
            "user.name=a",
            "-c",
            "user.email=a@b",
            *arguments,
        ]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    own, other = tmp_path / "own.py", tmp_path / "site-packages" / "other.py"
    other.parent.mkdir()
    own.write_text("1")
    other.write_text("1")
    assert checkout(own) == {"git": None, "changed": False}
    git("init")
    git("add", "own.py")
    git("commit", "-m", "one")
    assert checkout(own) == {"git": git("rev-parse", "HEAD"), "changed": False}
    assert checkout(other) == {"git": None, "changed": False}
    own.write_text("2")
    assert checkout(own)["changed"]


def test_a_device_with_a_number_and_a_seed_that_is_too_long(tmp_path):
    assert train(tmp_path / "run", config(), **{**QUIET, "device": f"{DEVICE.type}:0"})
    with pytest.raises(ValueError, match="seed must have 64 bits at most"):
        config(seed=2**63)
