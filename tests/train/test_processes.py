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

path, devices, parts = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
config = RunConfig(
    TaskConfig("shift", {"length": 32}), ModelConfig("dlr", {"d_state": 16}, d_model=16),
    steps=50, batch_size=8, lr=1e-3, accumulate=parts, clip=1.0, log_every=1, eval_every=25,
    eval_batches=3, checkpoint_every=50)
strategy = "ddp" if devices > 1 else "auto"
train(path, config, devices=devices, strategy=strategy, show=False, writer="none")
"""


@pytest.mark.parametrize("parts", [1, 2])
def test_two_processes_against_one(parts, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for name, launcher, devices in (("one", [], "1"), ("two", torchrun, "2")):
        command = [
            sys.executable,
            *launcher,
            str(script),
            str(tmp_path / name),
            devices,
            str(parts),
        ]
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
