"""Two processes on half a batch each are one process on the whole batch."""

import json
import os
import subprocess
import sys

import pytest

SCRIPT = """
import sys
import torch
torch.set_num_threads(1)
from dlrnn.models import ModelConfig
from dlrnn.train import RunConfig, TaskConfig, train

path, task, parts = sys.argv[1], sys.argv[2], int(sys.argv[3])
settings = {"shift": {"length": 32}, "listops-subtrees": {"length": 128},
            "pathfinder-segmentation": {"resolution": 32}}[task]
both = {"bidirectional": True} if task.startswith("path") else {}
config = RunConfig(
    TaskConfig(task, settings), ModelConfig("dlr", {"d_state": 16, **both}, d_model=16),
    steps=50, batch_size=8, lr=1e-3, accumulate=parts, clip=1.0, log_every=1, eval_every=25,
    eval_batches=1, checkpoint_every=50)
train(path, config, show=False, writer="none")
"""


@pytest.mark.parametrize(
    ("task", "parts"), [("shift", 2), ("listops-subtrees", 1), ("pathfinder-segmentation", 1)]
)
def test_two_processes_against_one(task, parts, tmp_path):
    """Also with micro-batches, with losses that count positions or weigh classes, and where one
    process has nothing to evaluate.
    """
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for name, launcher in (("one", []), ("two", torchrun)):
        command = [sys.executable, *launcher, str(script), str(tmp_path / name), task, str(parts)]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=240, check=False, env=environment
        )
        assert done.returncode == 0, done.stdout + done.stderr
    one, two = (
        [json.loads(line) for line in (tmp_path / name / "records.jsonl").read_text().splitlines()]
        for name in ("one", "two")
    )
    assert len(one) == 52
    for a, b in zip(one, two, strict=True):
        assert a.keys() == b.keys()
        assert a["step"] == b["step"]
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-6), a
