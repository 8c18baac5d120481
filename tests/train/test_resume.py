"""A run that was killed at any moment and resumed ends with the same bytes."""

import json

import pytest
from runs import EVERY, assert_same_files, assert_same_run, language_run
from support import run_python, tiny_books

from dlrnn.models import ModelConfig
from dlrnn.train import RunConfig, TaskConfig

# The parent imports everything and forks children, which are killed (-9) at random moments.
SCRIPT = """
import os, random, shutil, signal, sys, time, warnings
from pathlib import Path
warnings.simplefilter("ignore", DeprecationWarning)  # fork, with threads that do nothing
import torch
torch.set_num_threads(1)
import lightning_fabric.strategies.model_parallel  # otherwise children spend their time on it
from dlrnn.train import from_json, train

base, kills, longest = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
config = from_json(Path(base, "config.json").read_text())
config.make_task().sample(1)  # compiled once

def child(path):
    pid = os.fork()
    if pid == 0:
        try:
            begun = os.path.exists(path + "/config.json")
            train(path, None if begun else config, show=False, writer="none")
        except BaseException as error:
            print(repr(error), flush=True)
            os._exit(1)
        os._exit(0)
    return pid

assert os.waitpid(child(base + "/whole"), 0)[1] == 0

broken = base + "/broken"
moments, done = random.Random(0), 0
while done < kills or not list(Path(broken).glob("step-*")):
    pid = child(broken)
    time.sleep(moments.uniform(0, longest))
    os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status):
        done += 1
        longest *= 1.1 if done > kills else 1  # a slow machine: some kill comes after a checkpoint
    else:  # a fast machine: the run was complete; kill it earlier
        assert status == 0
        shutil.rmtree(broken)
        done, longest = 0, longest / 2
assert os.waitpid(child(broken), 0)[1] == 0
"""

EVERY = {**EVERY, "checkpoint_every": 9}
DLR = ModelConfig("dlr", {"d_state": 8}, d_model=8)
DROPOUT = ModelConfig("attention", {"heads": 2, "dropout": 0.2, "bidirectional": True}, d_model=8)
WARMUP = {"schedule": "cosine", "warmup": 30}


def regression(_):
    settings = {**EVERY, **WARMUP, "batch_size": 4, "accumulate": 2, "lr": 1e-3}
    return RunConfig(TaskConfig("shift", {"length": 16}), DLR, steps=1500, **settings)


def dropout(_):
    return RunConfig(TaskConfig("pathfinder"), DROPOUT, steps=60, batch_size=2, lr=1e-3, **EVERY)


def language(folder):
    settings = {**EVERY, "steps": 90, "accumulate": 2, "weight_decay": 0.1}
    return language_run(tiny_books(folder), **settings)


@pytest.mark.parametrize(
    ("config", "kills", "longest"), [(regression, 8, 0.5), (dropout, 3, 1), (language, 3, 1)]
)
def test_kill_and_resume_give_the_same_bytes(config, kills, longest, tmp_path):
    (tmp_path / "config.json").write_text(config(tmp_path).to_json())
    run_python(SCRIPT, str(tmp_path), str(kills), str(longest))
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert_same_run(whole, broken)
    assert_same_files(whole, broken, [path.name for path in whole.glob("tokenizer.json")])
    results = [json.loads((folder / "result.json").read_text()) for folder in (whole, broken)]
    for result in results:
        del result["seconds"], result["seconds_from_step"]
    assert results[0] == results[1]
