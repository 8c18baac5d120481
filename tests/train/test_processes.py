"""Two processes on half a batch each are one process on the whole batch."""

import json
import os
import shutil
import subprocess
import sys
from unittest.mock import patch

import pytest
import torch
from support import tiny_books

from dlrnn import recipes
from dlrnn.train import train

SCRIPT = """
import sys
import torch
torch.set_num_threads(1)
from dlrnn.models import ModelConfig
from dlrnn.train import RunConfig, TaskConfig, train

path, task, parts, how = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
settings = {"shift": {"length": 32}, "listops-subtrees": {"length": 128},
            "pathfinder-segmentation": {"resolution": 32}}[task]
both = {"bidirectional": True} if task.startswith("path") else {}
config = RunConfig(
    TaskConfig(task, settings), ModelConfig("dlr", {"d_state": 16, **both}, d_model=16),
    steps=50, batch_size=8, lr=1e-3, accumulate=parts, clip=1.0, log_every=1, eval_every=25,
    eval_batches=1, checkpoint_every=25)
train(path, None if how == "resumed" else config, show=False, writer="none",
      sharded=how in ("sharded", "resumed"))
"""


def run(folder, task, parts, how):
    """In two processes."""
    script = folder.parent / "script.py"
    script.write_text(SCRIPT)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *torchrun, str(script), str(folder), task, str(parts), how]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = launched(command, environment, folder, how)
    assert done.returncode == 0, done.stdout + done.stderr
    return records(folder)


def run_alone(folder, task, parts):
    """Here, in this process."""
    threads = torch.get_num_threads()
    try:
        with patch.object(sys, "argv", ["script", str(folder), task, str(parts), "copies"]):
            exec(SCRIPT, {})
    finally:
        torch.set_num_threads(threads)
    return records(folder)


def records(folder):
    return [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]


def launched(command, environment, folder, how):
    """gloo under FSDP aborts now and then when a process ends (seen once in six runs of all tests;
    the cause is open): such an end, and nothing else, is tried again.
    """
    for _ in range(4):
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=240, check=False, env=environment
        )
        if how == "copies" or "Signal 6 (SIGABRT)" not in done.stderr + done.stdout:
            break
        if how != "resumed":
            shutil.rmtree(folder, ignore_errors=True)
    return done


def assert_same_losses(one, two):
    assert len(one) == 52
    for a, b in zip(one, two, strict=True):
        assert a.keys() == b.keys()
        assert a["step"] == b["step"]
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-6), a


@pytest.mark.parametrize(
    ("task", "parts"), [("shift", 2), ("listops-subtrees", 1), ("pathfinder-segmentation", 1)]
)
def test_two_processes_against_one(task, parts, tmp_path):
    """Also with micro-batches, with losses that count positions or weigh classes, and where one
    process has nothing to evaluate.
    """
    one = run_alone(tmp_path / "one", task, parts)
    assert_same_losses(one, run(tmp_path / "two", task, parts, "copies"))


def test_sharded_processes_against_one(tmp_path):
    """Also when they were stopped half-way: then every byte is the same."""
    one = run_alone(tmp_path / "one", "shift", 2)
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert_same_losses(one, run(whole, "shift", 2, "sharded"))
    shutil.copytree(whole, stopped)
    for name in ("result.json", "step-000000050.safetensors"):
        (stopped / name).unlink()
    run(stopped, "shift", 2, "resumed")
    for name in ("records.jsonl", "step-000000050.safetensors", "best.safetensors"):
        assert (whole / name).read_bytes() == (stopped / name).read_bytes()


def test_sharded_needs_several_processes(tmp_path):
    config = recipes.scaled(recipes.get("table1/shift/dlr-1"), "tiny")
    with pytest.raises(ValueError, match="--sharded needs several processes: say --devices"):
        train(tmp_path / "run", config, show=False, sharded=True)
    assert not (tmp_path / "run").exists()


LANGUAGE = """
import sys
import torch
torch.set_num_threads(1)
from dlrnn.models import LanguageConfig
from dlrnn.train import RunConfig, TaskConfig, train

path, folder, router, how = sys.argv[1:5]
sizes = {"layers": 1, "d_model": 16, "d_state": 8, "d_embedding": 8, "d_ff": 16, "vocabulary": 32}
config = RunConfig(
    TaskConfig("pg19", {"length": 32, "folder": folder}),
    LanguageConfig(**sizes, experts=4, router=router, dt_min=0.05, dt_max=0.5, kernel_length=32),
    steps=12, batch_size=64, lr=1e-4, log_every=1, eval_every=3, checkpoint_every=6)
train(path, None if how == "resumed" else config, show=False, writer="none",
      sharded=how != "copies")
"""


def test_processes_agree_on_what_experts_learn(tmp_path):
    """Their thresholds are buffers: averaged after each step, so that two processes judge alike,
    also one that has no batch to evaluate, and a resumed run is the same, byte for byte.
    """
    folder, script = tiny_books(tmp_path), tmp_path / "script.py"
    script.write_text(LANGUAGE)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

    def go(run, router, how):
        command = [sys.executable, *torchrun, str(script), str(tmp_path / run), str(folder)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = launched([*command, router, how], environment, tmp_path / run, how)
        assert done.returncode == 0, done.stdout + done.stderr

    go("copies", "top", "copies")  # one batch of validation, two processes
    go("whole", "threshold", "sharded")
    shutil.copytree(tmp_path / "whole", tmp_path / "stopped")
    for name in ("result.json", "step-000000012.safetensors"):
        (tmp_path / "stopped" / name).unlink()
    go("stopped", "threshold", "resumed")
    for name in ("records.jsonl", "step-000000012.safetensors"):
        whole, stopped = ((tmp_path / run / name).read_bytes() for run in ("whole", "stopped"))
        assert whole == stopped
