"""Losses and metrics of classes against definitions written with loops."""

import math

import pytest
import torch
from support import DEVICE

from dlrnn import tasks
from dlrnn.tasks.classes import (
    accuracy,
    balanced_cross_entropy,
    confusion,
    cross_entropy,
    macro_scores,
)
from dlrnn.tasks.task import IGNORED


def case(classes=3, shape=(4, 17), seed=0, ignored=0.3):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(*shape, classes, generator=generator, dtype=torch.float64)
    targets = torch.randint(classes, shape, generator=generator)
    targets[torch.rand(shape, generator=generator) < ignored] = IGNORED
    return logits.to(DEVICE), targets.to(DEVICE)


def pairs(logits, targets):
    """(logits, class) of the positions that count."""
    flat = zip(logits.flatten(0, -2).tolist(), targets.flatten().tolist(), strict=True)
    return [(row, target) for row, target in flat if target != IGNORED]


def minus_log(row, target):
    return math.log(sum(math.exp(value) for value in row)) - row[target]


def test_cross_entropy():
    logits, targets = case()
    counted = pairs(logits, targets)
    expected = sum(minus_log(*pair) for pair in counted) / len(counted)
    assert cross_entropy(logits, targets).item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("missing", [None, 1])
def test_every_class_weighs_the_same(missing):
    logits, targets = case(ignored=0.0 if missing is None else 0.3)
    if missing is not None:
        targets[targets == missing] = 2
    losses = {}
    for row, target in pairs(logits, targets):
        losses.setdefault(target, []).append(minus_log(row, target))
    expected = sum(sum(of) / len(of) for of in losses.values()) / len(losses)
    assert balanced_cross_entropy(logits, targets).item() == pytest.approx(expected, rel=1e-12)


def test_accuracy_and_confusion():
    logits, targets = case()
    counted = [(row.index(max(row)), target) for row, target in pairs(logits, targets)]
    right = sum(called == target for called, target in counted) / len(counted)
    assert accuracy(logits, targets).item() == pytest.approx(right)
    table = [[counted.count((called, real)) for called in range(3)] for real in range(3)]
    assert confusion(logits, targets).tolist() == table


@pytest.mark.parametrize("seed", range(4))
def test_macro_scores(seed):
    logits, targets = case(seed=seed)
    if seed == 3:  # a class that is neither there nor called does not count
        targets[targets == 1], logits[..., 1] = 0, -9
    counted = [(row.index(max(row)), target) for row, target in pairs(logits, targets)]
    f1, recall = [], []
    for c in range(3):
        hits = counted.count((c, c))
        real = sum(target == c for _, target in counted)
        called = sum(guess == c for guess, _ in counted)
        if real + called:
            f1.append(2 * hits / (real + called))
        if real:
            recall.append(hits / real)
    scores = macro_scores(logits, targets)
    assert scores["macro_f1"].item() == pytest.approx(sum(f1) / len(f1))
    assert scores["macro_accuracy"].item() == pytest.approx(sum(recall) / len(recall))


@pytest.mark.parametrize("name", ["listops-subtrees", "pathfinder-segmentation", "pathfinder"])
def test_an_output_of_another_shape_is_not_judged(name):
    task = tasks.get(name, **({"length": 64} if name.startswith("listops") else {}))
    batch = task.sample(2)
    shape = (*batch.targets.shape, task.d_output)
    task.loss(torch.zeros(shape), batch)
    for wrong in ((*shape[:-1], shape[-1] + 1), (1, *shape[1:]), shape[1:]):
        for judge in (task.loss, task.metrics):
            with pytest.raises(ValueError, match=f"{name}: the output must have the shape"):
                judge(torch.zeros(wrong), batch)


def test_perfect_and_nothing_to_judge():
    targets = torch.tensor([0, 1, 2, 2], device=DEVICE)
    logits = torch.nn.functional.one_hot(targets, 3).double()
    assert macro_scores(logits, targets)["macro_f1"] == 1
    assert accuracy(logits, targets) == 1
    assert accuracy(logits, torch.full_like(targets, IGNORED)) == 0
