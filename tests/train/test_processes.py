"""Two processes with half of a batch each equal one process with the whole batch."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
from runs import TINY_LANGUAGE, language_run, refused
from runs import config as tiny_run
from support import tiny_books

from dlrnn.models import ModelConfig
from dlrnn.train import RunConfig, TaskConfig, train

SCRIPT = """
import json, os, pathlib, signal, sys, time, torch
torch.set_num_threads(1)
from dlrnn.train import early_stopping, from_json, train, trainer
from dlrnn.train.checkpoint import checkpoints, save_checkpoint
from dlrnn.train.step import TrainingStep

original, rank = TrainingStep.__call__, int(os.environ["RANK"])

def asked_in_step_7(self, step, batches):
    original(self, step, batches)
    if step == 7 and rank == 1:
        for _ in range(2):  # as from `timeout`
            os.kill(os.getpid(), signal.SIGTERM)

def slowly(*arguments):
    time.sleep(1)
    save_checkpoint(*arguments)

for path, config, sharded in json.loads(sys.argv[1]):
    config = config and from_json(config)
    how = {"device": "cpu", "show": False, "writer": "none", "sharded": sharded}
    if "plain" in path:
        early_stopping.LEVELS, how["early_stop"] = {1: (-9.0, 9.0)}, True
    if path.endswith("without a part"):
        try:
            train(path, config, **how)
        except ValueError as error:
            (pathlib.Path(path) / f"said-{rank}").write_text(str(error))
        continue
    if not path.endswith("asked to stop"):
        train(path, config, **how)
        continue
    TrainingStep.__call__, trainer.save_checkpoint = asked_in_step_7, slowly
    try:
        train(path, config, **how)
        raise AssertionError("the signal was ignored")
    except KeyboardInterrupt:
        TrainingStep.__call__, trainer.save_checkpoint = original, save_checkpoint
    if rank == 1:  # it must not exit before all files are written
        left = [each.name for each in checkpoints(pathlib.Path(path))]
        (pathlib.Path(path) / "left.json").write_text(json.dumps(left))
    train(path, **how)
"""


IDLE = """
import torch
from dlrnn.nn import DLR

class Idle(DLR):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.idle, self.other = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
        self.frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)
"""


def in_two_processes(folder, runs):
    """Train runs one after the other: (name, configuration or None to resume it, sharded).

    gloo under FSDP sometimes aborts when a process ends (once in six runs of all tests; the cause
    is unknown). Such an abort, and nothing else, is tried again.
    """
    (folder / "script.py").write_text(SCRIPT)
    (folder / "idle_mixer.py").write_text(IDLE)
    asked = [(str(folder / name), config and config.to_json(), how) for name, config, how in runs]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *torchrun, str(folder / "script.py"), json.dumps(asked)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for _ in range(4):
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=900, check=False, env=environment
        )
        sharded = any(how for *_, how in runs)
        if not sharded or "Signal 6 (SIGABRT)" not in done.stderr + done.stdout:
            break
        for path, config, _ in asked:
            if config:
                shutil.rmtree(path, ignore_errors=True)
    assert done.returncode == 0, done.stdout + done.stderr


def stop_half_way(whole, stopped, last):
    """Copy a run without its last checkpoint, as if it had been killed before it."""
    shutil.copytree(whole, stopped)
    for name in ("result.json", last):
        (stopped / name).unlink()


def config(task, settings, *, parts=1, **options):
    return RunConfig(
        TaskConfig(task, settings),
        ModelConfig("dlr", {"d_state": 16, **options}, d_model=16),
        **{"steps": 50, "batch_size": 8, "lr": 1e-3, "accumulate": parts, "clip": 1.0},
        **{"log_every": 1, "eval_every": 25, "eval_batches": 1, "checkpoint_every": 25},
    )


TAKEN_APART = {
    "micro-batches": config("shift", {"length": 32}, parts=2),
    "losses that count positions": config("listops-subtrees", {"length": 128}),
    "weighed classes": config("pathfinder-segmentation", {"resolution": 32}, bidirectional=True),
    "growing lengths": replace(
        config("shift", {"length": 32}),
        model=ModelConfig("sgconv", {"length": 32, "d_kernel": 4}, d_model=16),
        lengths=[8, 32],
    ),
}


def experts(folder, router):
    """One batch of 64 holds the whole book, so one of two processes has nothing to evaluate."""
    every = {"log_every": 1, "eval_every": 3, "checkpoint_every": 6}
    model = replace(TINY_LANGUAGE, router=router)
    return language_run(folder, model=model, steps=12, batch_size=64, lr=1e-4, **every)


def records(folder):
    return [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]


def assert_same_losses(one, two):
    assert len(one) == 52
    for a, b in zip(one, two, strict=True):
        assert a.keys() == b.keys()
        assert a["step"] == b["step"]
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-6), a


def test_two_processes_equal_one(tmp_path):
    """DDP and FSDP have the losses of one process, and sharded runs resume with the same bytes.

    The thresholds of experts are buffers, which the processes average after each step.
    """
    books = tiny_books(tmp_path)
    for name, each in TAKEN_APART.items():
        train(tmp_path / f"one, {name}", each, show=False, writer="none", device="cpu")
    shards = TAKEN_APART["micro-batches"]
    begun = [(f"two, {name}", each, False) for name, each in TAKEN_APART.items()]
    begun += [("two shards", shards, True), ("experts", experts(books, "threshold"), True)]
    begun.append(("copied experts", experts(books, "top"), False))
    few = replace(shards, steps=20, log_every=5)
    for how in (False, True):  # a signal to one of them ends both at their next record
        begun += [(f"{how} undisturbed", few, how), (f"{how} asked to stop", few, how)]
    never = replace(shards, log_every=100, eval_every=3)
    begun.append(("plain, asked to stop", never, False))
    idle = replace(shards, model=replace(shards.model, mixer="idle_mixer.Idle"))
    in_two_processes(tmp_path, [*begun, ("without a part", idle, False)])
    said = [(tmp_path / "without a part" / f"said-{rank}").read_text() for rank in (0, 1)]
    assert said[0] == said[1]
    assert said[0].startswith("blocks.0.mixer.idle and 1 more had no gradient")
    assert (
        json.loads((tmp_path / "plain, asked to stop" / "result.json").read_text())["steps"] == 12
    )
    for how in (False, True):
        stopped, whole = tmp_path / f"{how} asked to stop", tmp_path / f"{how} undisturbed"
        assert json.loads((stopped / "left.json").read_text()) == ["step-000000010.safetensors"]
        for file in ("records.jsonl", "step-000000020.safetensors"):
            assert (stopped / file).read_bytes() == (whole / file).read_bytes(), file
    for name in TAKEN_APART:
        assert_same_losses(*(records(tmp_path / f"{n}, {name}") for n in ("one", "two")))
    assert_same_losses(*(records(tmp_path / n) for n in ("one, micro-batches", "two shards")))

    stopped = {"two shards": "step-000000050", "experts": "step-000000012"}
    for name, last in stopped.items():
        stop_half_way(tmp_path / name, tmp_path / f"stopped {name}", f"{last}.safetensors")
    in_two_processes(tmp_path, [(f"stopped {name}", None, True) for name in stopped])
    for name, last in stopped.items():
        for file in ("records.jsonl", f"{last}.safetensors", "best.safetensors"):
            found = [tmp_path / run / file for run in (name, f"stopped {name}")]
            assert found[0].read_bytes() == found[1].read_bytes(), found


def test_sharded_needs_several_processes(tmp_path):
    sentence = "--sharded needs several processes: say --devices"
    refused(tmp_path / "run", sentence, tiny_run(), sharded=True)
