"""A run that was killed at any moment and resumed ends with the same bytes."""

import json

import pytest
from runs import assert_same_run
from support import run_python

# The parent imports everything and forks children, which are killed (-9) at random moments.
SCRIPT = """
import os, random, shutil, signal, sys, time, warnings
from pathlib import Path
warnings.simplefilter("ignore", DeprecationWarning)  # fork, with threads that do nothing
import torch
torch.set_num_threads(1)
import lightning_fabric.strategies.model_parallel  # what a child would load first, and be killed in
from dlrnn.models import ModelConfig
from dlrnn.train import RunConfig, RunFolder, TaskConfig, train

case, base, kills = sys.argv[1], sys.argv[2], int(sys.argv[3])
every = dict(log_every=5, eval_every=20, eval_batches=2, checkpoint_every=9)
dlr = ModelConfig("dlr", {"d_state": 8}, d_model=8)
drops = {"heads": 2, "dropout": 0.2, "bidirectional": True}
CASES = {
    "regression": RunConfig(TaskConfig("shift", {"length": 16}), dlr, steps=1500, batch_size=4,
                            lr=1e-3, accumulate=2, schedule="cosine", warmup=30, **every),
    "dropout": RunConfig(TaskConfig("pathfinder"), ModelConfig("attention", drops, d_model=8),
                         steps=60, batch_size=2, lr=1e-3, **every),
}
config = CASES[case]
config.make_task().sample(1)  # compiled once

def child(work):
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException as error:
            print(repr(error), flush=True)
            os._exit(1)
        os._exit(0)
    return pid

quiet = {"show": False, "writer": "none"}
pid = child(lambda: train(base + "/whole", config, **quiet))
assert os.waitpid(pid, 0)[1] == 0

broken, path = base + "/broken", base + "/broken/config.json"
moments, done, longest = random.Random(0), 0, float(sys.argv[4])
while done < kills or not list(Path(broken).glob("step-*")):
    pid = child(lambda: train(broken, None if os.path.exists(path) else config, **quiet))
    time.sleep(moments.uniform(0, longest))
    os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status):
        done += 1
        longest *= 1.1 if done > kills else 1  # a slow machine: some kill comes after a checkpoint
    else:  # a fast one: it was over before that; once more, killed earlier
        assert status == 0
        shutil.rmtree(broken)
        done, longest = 0, longest / 2
pid = child(lambda: train(broken, None if os.path.exists(path) else config, **quiet))
assert os.waitpid(pid, 0)[1] == 0
"""


@pytest.mark.parametrize(("case", "kills", "longest"), [("regression", 8, 0.5), ("dropout", 3, 1)])
def test_kill_and_resume_give_the_same_bytes(case, kills, longest, tmp_path):
    run_python(SCRIPT, case, str(tmp_path), str(kills), str(longest))
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert_same_run(whole, broken)
    results = [json.loads((folder / "result.json").read_text()) for folder in (whole, broken)]
    for result in results:
        del result["seconds"], result["seconds_from_step"]
    assert results[0] == results[1]
