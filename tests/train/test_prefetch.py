"""Batches that threads make in advance."""

import os
from unittest.mock import Mock

import pytest
import torch
from runs import config
from support import DEVICE

from dlrnn.models import ModelConfig
from dlrnn.tasks.listops import trees as listops_trees
from dlrnn.tasks.pathfinder import paths as pathfinder_paths
from dlrnn.tasks.pathfinder import pixels as pathfinder_pixels
from dlrnn.train import TaskConfig
from dlrnn.train.distributed import local_processes, make_fabric
from dlrnn.train.step import make_step, prefetch, thread_count


@pytest.mark.parametrize("threads", [1, 3])
def test_prefetched_batches_come_in_order(threads, monkeypatch):
    monkeypatch.setattr("dlrnn.train.step.thread_count", lambda *_: threads)
    task = TaskConfig("pathfinder-segmentation", {"resolution": 32})
    asked = config(task=task, model=ModelConfig("dlr", {"d_state": 4, "bidirectional": True}))
    step = make_step(asked, torch.device("cpu"))
    for k, batches in enumerate(step.prefetched(5, 17), start=5):
        for one, other in zip(batches, step.samples(k), strict=True):
            assert torch.equal(one.inputs, other.inputs)
    assert k == 16


def test_thread_count_depends_on_cores_device_and_processes(monkeypatch):
    alone = {(2, "cpu", 1): 1, (16, "cpu", 1): 8, (2, "cuda", 1): 1, (16, "cuda", 1): 14}
    several = {(64, "cuda", 1): 16, (128, "cuda", 8): 14, (16, "cuda", 8): 1, (8, "cpu", 2): 2}
    for (cores, device, processes), threads in (alone | several).items():
        monkeypatch.setattr(os, "sched_getaffinity", Mock(return_value=range(cores)), raising=False)
        assert thread_count(torch.device(device), processes) == threads


def test_local_processes_are_counted():
    several = Mock(parallel_devices=[torch.device("cpu")] * 8)
    assert local_processes(Mock(strategy=several)) == 8
    assert local_processes(make_fabric(DEVICE.type, "fp32")) == 1


@pytest.mark.parametrize("threads", [1, 3])
def test_prefetch_is_bounded_and_stops_when_closed(threads):
    begun = []

    def make(number):
        begun.append(number)
        if number == 30:
            raise ValueError("a sample that cannot be")
        return 10 * number

    made = prefetch(make, range(5, 100, 5), threads)
    assert [next(made), next(made)] == [50, 100]
    assert max(begun) <= 5 * (1 + threads + 2 + 1)
    made.close()
    known = len(begun)
    assert list(made) == []
    assert len(begun) == known, "the rest is not made"
    with pytest.raises(ValueError, match="a sample that cannot be"):
        list(prefetch(make, range(5, 100, 5), threads))
    assert list(prefetch(make, range(0), threads)) == []


def test_drawing_kernels_release_the_interpreter_lock():
    for kernel in (pathfinder_paths.draw, pathfinder_pixels.paint, listops_trees.draw):
        assert kernel.targetoptions["nogil"]
