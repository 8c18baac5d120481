"""Requests, settings and outputs that a task refuses; losses and metrics against loops."""

import math

import numpy as np
import pytest
import torch
from support import DEVICE

from dlrnn import tasks
from dlrnn.tasks.base import (
    IGNORED,
    accuracy,
    balanced_cross_entropy,
    confusion,
    cross_entropy,
    macro_scores,
)


def test_every_task_has_a_definition_and_sizes():
    assert len(tasks.TASKS) == 20
    definitions = {kind().definition for kind in tasks.TASKS.values()}
    assert len(definitions) == 20
    for kind in tasks.TASKS.values():
        task = kind()
        assert task.definition.endswith(".")
        assert 60 < len(task.definition) < 350
        assert task.probes
        assert task.output_length <= task.input_length


# ---------------------------------------------------------------------------------- requests


@pytest.mark.parametrize(
    ("name", "settings", "keywords"),
    [
        ("shfit", {}, "no task 'shfit': did you mean 'shift'"),
        ("ContextShift", {}, "no task 'ContextShift': did you mean 'context-shift'"),
        ("select_fixed", {}, "no task 'select_fixed': did you mean 'select-fixed'"),
        ("xyzzy", {}, "no task 'xyzzy': there are: shift, cumsum"),
        (None, {}, "no task None"),
        (3, {}, "no task 3"),
        ("sort", {"lenght": 8}, "no setting 'lenght': did you mean 'length'"),
        ("sort", {"xyzzy": 8}, "no setting 'xyzzy': its settings are seed, length"),
        ("shift", {"length": 12}, "shift: .* multiple of the 8 copies.* 12"),
        ("sort", {"length": 0}, "sort: .* at least 1, not 0"),
        ("solve", {"length": 2}, "solve: .* at least 3, not 2"),
        ("sort", {"length": 8.0}, "sort: length must be a whole number, not 8.0"),
        ("select", {"marked": 0}, "select: marked must be at least 1, not 0"),
        ("mips", {"width": 0}, "mips: width must be at least 1, not 0"),
        ("text", {"length": 0}, "text: length must be from 1 to .* not 0"),
        ("text", {"length": 2**20 + 1}, "text: length must be from 1 to .* not 1048577"),
        ("pg19", {"length": 0}, "length must be at least 1, not 0"),
        ("pg19", {"held_out": -1}, "held_out must be at least 0, not -1"),
        ("listops", {"seed": 2**64}, "listops: seed must be from"),
        ("pathfinder", {"seed": 2**64}, "pathfinder: seed must be from"),
        ("path-x", {"seed": 2**64}, "path-x: seed must be from"),
        ("pathfinder-segmentation", {"resolution": 31}, "from 32 to 1024, not 31"),
        ("listops-subtrees", {"length": 3}, "listops-subtrees: .* from 64 to 65536, not 3"),
        ("listops-subtrees", {"length": 65_537}, "from 64 to 65536, not 65537"),
    ],
)
def test_unknown_names_and_invalid_settings_are_refused(name, settings, keywords, unchecked):
    with pytest.raises(ValueError, match=keywords):
        tasks.get(name, **settings)


@pytest.mark.parametrize("name", ["shift", "listops"])
@pytest.mark.parametrize(
    ("request_", "keywords"),
    [
        ({"batch_size": 0}, "batch_size .* at least 1, not 0"),
        ({"batch_size": 1.5}, "batch_size must be a whole number, not 1.5"),
        ({"batch_size": True}, "batch_size must be a whole number, not True"),
        ({"split": "valid"}, "train, validation or test, not 'valid'"),
        ({"split": "constants"}, "train, validation or test, not 'constants'"),
        ({"step": -1}, "step .* at least 0, not -1"),
        ({"step": 1.5}, "step must be a whole number, not 1.5"),
        ({"step": np.int64(-3)}, "step .* at least 0, not -3"),
        ({"step": torch.tensor([1, 2])}, "step, if it is a tensor.* int64"),
        ({"step": torch.tensor(1.0)}, "step, if it is a tensor.* int64"),
        ({"first": -1, "of": 4}, "first .* at least 0, not -1"),
        ({"first": "1"}, "first must be a whole number, not '1'"),
    ],
    ids=str,
)
def test_invalid_requests_are_refused(name, request_, keywords, unchecked):
    task = tasks.get(name, length=64) if name == "shift" else tasks.get(name)
    with pytest.raises(ValueError, match=keywords):
        task.sample(**{"batch_size": 2, **request_})
    if "step" in request_:
        with pytest.raises(ValueError, match=keywords):
            task.preview(step=request_["step"])


@pytest.mark.parametrize(
    ("name", "shape"),
    [("shift", (3, 64, 8)), ("pg19", (3, 64)), ("listops-subtrees", (3, 64, 10)),
     ("pathfinder-segmentation", (3, 1024, 3)), ("pathfinder", (3, 2))],
)  # fmt: skip
def test_an_output_of_another_shape_is_refused(name, shape, unchecked):
    """An output that could be broadcast would have a loss."""
    small = {"resolution": 32} if "seg" in name else {"length": 64} if len(shape) > 2 else {}
    task = tasks.get(name, **small)
    if name == "pg19":
        batch = tasks.Batch(*torch.zeros(2, 3, 64, dtype=torch.long))
        scores = [task.loss]
    else:
        batch, scores = task.sample(3), [task.loss, task.metrics]
    assert task.loss(torch.ones(shape), batch).isfinite()
    others = [(*shape[:-1], shape[-1] + 1), (1, *shape[1:]), (3, 1, *shape[2:]), shape[1:], (3,)]
    others += [(3, 128, *shape[2:]), (*shape, 9), ()]
    for other in others:
        for score in scores:
            with pytest.raises(ValueError, match=f"{name}: .* shape") as error:
                score(torch.zeros(other), batch)
            assert f"{list(shape)}, not {list(other)}" in str(error.value)


# ---------------------------------------------------------------------------------- metrics


def case(classes=3, shape=(4, 17), seed=0, ignored=0.3):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(*shape, classes, generator=generator, dtype=torch.float64)
    targets = torch.randint(classes, shape, generator=generator)
    targets[torch.rand(shape, generator=generator) < ignored] = IGNORED
    return logits.to(DEVICE), targets.to(DEVICE)


def pairs(logits, targets):
    """(logits, class) of the targets that are not ignored."""
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
def test_balanced_cross_entropy_gives_classes_the_same_weight(missing):
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
    right = sum(predicted == target for predicted, target in counted) / len(counted)
    assert accuracy(logits, targets).item() == pytest.approx(right)
    table = [[counted.count((predicted, real)) for predicted in range(3)] for real in range(3)]
    assert confusion(logits, targets).tolist() == table


@pytest.mark.parametrize("seed", range(4))
def test_macro_scores(seed):
    logits, targets = case(seed=seed)
    if seed == 3:  # a class that neither occurs nor is predicted does not count
        targets[targets == 1], logits[..., 1] = 0, -9
    counted = [(row.index(max(row)), target) for row, target in pairs(logits, targets)]
    f1, recall = [], []
    for c in range(3):
        hits = counted.count((c, c))
        real = sum(target == c for _, target in counted)
        predicted = sum(guess == c for guess, _ in counted)
        if real + predicted:
            f1.append(2 * hits / (real + predicted))
        if real:
            recall.append(hits / real)
    scores = macro_scores(logits, targets)
    assert scores["macro_f1"].item() == pytest.approx(sum(f1) / len(f1))
    assert scores["macro_accuracy"].item() == pytest.approx(sum(recall) / len(recall))


def test_accuracy_without_targets_is_zero():
    logits, targets = case(ignored=1)
    assert accuracy(logits, targets) == 0
