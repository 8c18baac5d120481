"""Two processes on half a batch each are one process on the whole batch."""

import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from support import tiny_books

from dlrnn import recipes
from dlrnn.train import train

SCRIPT = """
import json
import sys
import torch
torch.set_num_threads(1)
from dlrnn.models import ModelConfig
from dlrnn.train import RunConfig, TaskConfig, train

SETTINGS = {"shift": {"length": 32}, "listops-subtrees": {"length": 128},
            "pathfinder-segmentation": {"resolution": 32}}
for path, task, parts, how in json.loads(sys.argv[1]):
    both = {"bidirectional": True} if task.startswith("path") else {}
    config = RunConfig(
        TaskConfig(task, SETTINGS[task]), ModelConfig("dlr", {"d_state": 16, **both}, d_model=16),
        steps=50, batch_size=8, lr=1e-3, accumulate=parts, clip=1.0, log_every=1, eval_every=25,
        eval_batches=1, checkpoint_every=25)
    train(path, None if how == "resumed" else config, show=False, writer="none",
          sharded=how in ("sharded", "resumed"))
"""


def run(script, runs):
    """In two processes, one run (its folder first, what it is last) after the other: to start
    processes takes longer than a run.

    gloo under FSDP aborts now and then when a process ends (seen once in six runs of all tests;
    the cause is open): such an end, and nothing else, is tried again.
    """
    path = Path(runs[0][0]).parent / "script.py"
    path.write_text(script)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *torchrun, str(path), json.dumps(runs, default=str)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for _ in range(4):
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=240, check=False, env=environment
        )
        sharded = any(how != "copies" for *_, how in runs)
        if not sharded or "Signal 6 (SIGABRT)" not in done.stderr + done.stdout:
            break
        for folder, *_, how in runs:
            if how != "resumed":
                shutil.rmtree(folder, ignore_errors=True)
    assert done.returncode == 0, done.stdout + done.stderr


def run_alone(runs):
    """Here, in this process."""
    threads = torch.get_num_threads()
    try:
        with patch.object(sys, "argv", ["script", json.dumps(runs, default=str)]):
            exec(SCRIPT, {})
    finally:
        torch.set_num_threads(threads)


def stop_half_way(whole, stopped, last):
    """As if the run had been killed before its last checkpoint."""
    shutil.copytree(whole, stopped)
    for name in ("result.json", last):
        (stopped / name).unlink()


def records(folder):
    return [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]


def assert_same_losses(one, two):
    assert len(one) == 52
    for a, b in zip(one, two, strict=True):
        assert a.keys() == b.keys()
        assert a["step"] == b["step"]
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-6), a


def test_two_processes_against_one(tmp_path):
    """Also with micro-batches, with losses that count positions or weigh classes, and where one
    process has nothing to evaluate.
    """
    tasks = {"shift": 2, "listops-subtrees": 1, "pathfinder-segmentation": 1}
    for name, go in (("one", run_alone), ("two", partial(run, SCRIPT))):
        go([(tmp_path / f"{name}-{task}", task, parts, "copies") for task, parts in tasks.items()])
    for task in tasks:
        assert_same_losses(*(records(tmp_path / f"{name}-{task}") for name in ("one", "two")))


def test_sharded_processes_against_one(tmp_path):
    """Also when they were stopped half-way: then every byte is the same."""
    one, whole, stopped = (tmp_path / name for name in ("one", "whole", "stopped"))
    last = "step-000000050.safetensors"
    run_alone([(one, "shift", 2, "copies")])
    run(SCRIPT, [(whole, "shift", 2, "sharded")])
    assert_same_losses(records(one), records(whole))
    stop_half_way(whole, stopped, last)
    run(SCRIPT, [(stopped, "shift", 2, "resumed")])
    for name in ("records.jsonl", last, "best.safetensors"):
        assert (whole / name).read_bytes() == (stopped / name).read_bytes()


def test_sharded_needs_several_processes(tmp_path):
    config = recipes.scaled(recipes.get("table1/shift/dlr-1"), "tiny")
    with pytest.raises(ValueError, match="--sharded needs several processes: say --devices"):
        train(tmp_path / "run", config, show=False, sharded=True)
    assert not (tmp_path / "run").exists()


LANGUAGE = """
import json
import sys
import torch
torch.set_num_threads(1)
from dlrnn.models import LanguageConfig
from dlrnn.train import RunConfig, TaskConfig, train

sizes = {"layers": 1, "d_model": 16, "d_state": 8, "d_embedding": 8, "d_ff": 16, "vocabulary": 32}
for path, folder, router, how in json.loads(sys.argv[1]):
    model = LanguageConfig(
        **sizes, experts=4, router=router, dt_min=0.05, dt_max=0.5, kernel_length=32)
    config = RunConfig(
        TaskConfig("pg19", {"length": 32, "folder": folder}), model,
        steps=12, batch_size=64, lr=1e-4, log_every=1, eval_every=3, checkpoint_every=6)
    train(path, None if how == "resumed" else config, show=False, writer="none",
          sharded=how != "copies")
"""


def test_processes_agree_on_what_experts_learn(tmp_path):
    """Their thresholds are buffers: averaged after each step, so that two processes judge alike,
    also one that has no batch to evaluate, and a resumed run is the same, byte for byte.
    """
    books = tiny_books(tmp_path)
    copies, whole, stopped = (tmp_path / name for name in ("copies", "whole", "stopped"))
    last = "step-000000012.safetensors"
    one_batch_for_two = (copies, books, "top", "copies")
    run(LANGUAGE, [one_batch_for_two, (whole, books, "threshold", "sharded")])
    stop_half_way(whole, stopped, last)
    run(LANGUAGE, [(stopped, books, "threshold", "resumed")])
    for name in ("records.jsonl", last):
        assert (whole / name).read_bytes() == (stopped / name).read_bytes()
