"""20 steps of five recipes at tiny size: losses pinned, the same on any CPU.

`python tests/train/test_golden.py` writes golden.json anew: only when other numbers are meant.
"""

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support import DEVICE

from dlrnn.paper import recipes
from dlrnn.train import RunDirectory, train

GOLDEN = Path(__file__).with_name("golden.json")
NAMES = (
    "table1/shift/dlr-1",
    "table1/cummax/attention-1",
    "table2/16384/dlr-prod",
    "table3/listops-subtrees/dss",
    "table3/pathfinder-segmentation-128/dlr",
)


def losses(name: str, folder: str) -> list[float]:
    config = recipes.scaled(recipes.get(name), "tiny")
    every = {"log_every": 1, "eval_every": 20, "eval_batches": 1, "checkpoint_every": 20}
    train(folder, replace(config, steps=20, **every), show=False, writer="none")
    return [r["loss"] for r in RunDirectory.open(folder).records() if r["split"] == "train"]


@pytest.mark.skipif(DEVICE.type != "cpu", reason="pinned on CPUs")
@pytest.mark.parametrize("name", NAMES)
def test_losses_equal_the_golden_ones(name, tmp_path):
    expected = json.loads(GOLDEN.read_text())[name]
    assert len(expected) == 20
    assert losses(name, str(tmp_path / "run")) == pytest.approx(expected, rel=1e-4)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        pinned = {name: losses(name, f"{folder}/{k}") for k, name in enumerate(NAMES)}
    GOLDEN.write_text(json.dumps(pinned, indent=1) + "\n")
    sys.stdout.write(f"written: {GOLDEN}\n")
