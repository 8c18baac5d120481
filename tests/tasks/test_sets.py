"""Tasks over sets: drawn on the spot or read from a folder, always the same batches."""

import numpy as np
import pytest
import torch

from dlrnn import tasks
from dlrnn.tasks import listops, pathfinder
from dlrnn.tasks.build import build_set
from dlrnn.tasks.listops_text import CLOSE
from dlrnn.tasks.sets import WINDOW, shuffled
from dlrnn.tasks.task import IGNORED

COUNTS = {"train": 50, "validation": 7, "test": 3}
SETS = {
    "listops": listops.lra(counts=COUNTS, shard_rows=40),
    "listops-subtrees": listops.subtrees(
        counts=COUNTS, shard_rows=40, min_length=224, max_length=256
    ),
    "pathfinder-segmentation": pathfinder.segmentation(64, counts=COUNTS, shard_rows=40),
    "pathfinder": pathfinder.lra(counts=COUNTS, shard_rows=40),
}
SETTINGS = {"listops-subtrees": {"length": 256}, "pathfinder-segmentation": {"resolution": 64}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("sets")
    return {name: str(build_set(spec, root / name)) for name, spec in SETS.items()}


def task_of(name, folders=None):
    folder = {} if folders is None else {"folder": folders[name]}
    return tasks.get(name, **SETTINGS.get(name, {}), **folder)


def same(a, b):
    return all((x is None and y is None) or torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("name", SETS)
def test_held_out_samples_are_those_of_the_generator(name, folders):
    drawn, stored = task_of(name), task_of(name, folders)
    assert drawn.count("validation") is None
    assert stored.count("validation") == 7
    for step in (0, 1):
        batches = [task.sample(3, split="validation", step=step) for task in (drawn, stored)]
        assert same(*batches)


@pytest.mark.parametrize("name", SETS)
def test_an_epoch_has_every_training_sample_once(name, folders):
    task = task_of(name, folders)
    for epoch in (0, 1):
        steps = range(5 * epoch, 5 * epoch + 5)
        rows = [row for step in steps for row in task.sample(10, step=step).inputs]
        assert len({row.numpy().tobytes() for row in rows}) == 50
    assert not torch.equal(task.sample(50).inputs, task.sample(50, step=1).inputs)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("on_disk", [False, True])
def test_parts_of_a_batch(name, on_disk, folders):
    task = task_of(name, folders if on_disk else None)
    whole = task.sample(6, step=3)
    parts = [task.sample(2, step=3, first=first, of=6) for first in (0, 2, 4)]
    for k, part in enumerate(whole):
        if part is not None:
            assert torch.equal(part, torch.cat([p[k] for p in parts]))


@pytest.mark.parametrize("name", tasks.TASKS)
def test_what_a_task_says_is_what_it_gives(name):
    small = {"listops-subtrees": {"length": 512}, "pathfinder-segmentation": {"resolution": 64}}
    task = tasks.get(name, **small.get(name, {}))
    batch = task.sample(2, split="test", step=1)
    if task.vocabulary is None:
        assert batch.inputs.shape == (2, task.input_length, task.d_input)
    else:
        assert batch.inputs.shape == (2, task.input_length)
        assert batch.inputs.min() >= 0
        assert batch.inputs.max() < task.vocabulary
    shape = (2, task.d_output) if task.pooled else (2, task.input_length, task.d_output)
    output = torch.randn(shape, requires_grad=True)
    task.loss(output, batch).backward()
    assert output.grad.isfinite().all()
    assert output.grad.any()
    assert task.metric in task.metrics(output, batch)
    assert task.kind in ("regression", "tagging", "classification")


def test_listops_labels_are_values():
    task = tasks.get("listops-subtrees", length=512)
    batch = task.sample(3)
    for tokens, targets in zip(batch.inputs.numpy(), batch.targets.numpy(), strict=True):
        assert ((targets != IGNORED) == (tokens == CLOSE)).all()
        text = listops.to_text(tokens.astype(np.uint8))
        assert targets[targets != IGNORED].tolist() == listops.sub_values(text)


def test_listops_classes():
    task = tasks.get("listops")
    batch = task.sample(3)
    for tokens, target, length in zip(*batch, strict=True):
        assert (tokens[:length] > 0).all()
        assert not tokens[length:].any()
        assert listops.evaluate(listops.to_text(tokens.numpy().astype(np.uint8))) == target


def test_pixels_and_masks():
    task = tasks.get("pathfinder-segmentation", resolution=64)
    batch, images = task.sample(3), [task.spec().draw("train", k) for k in range(3)]
    for pixels, mask, image in zip(batch.inputs, batch.targets, images, strict=True):
        back = ((pixels[:, 0] + 1) * 127.5).round().to(torch.uint8)
        assert (back.numpy() == image.pixels.ravel()).all()
        assert (mask.numpy() == image.mask.ravel()).all()


def test_order_of_an_epoch():
    order = shuffled(3, 2, 1000, 10)
    assert sorted(order) == list(range(1000))
    assert (order != np.arange(1000)).mean() > 0.9
    first = order[: WINDOW * 10] // 10
    assert len(set(first)) == WINDOW, "a window has whole groups, so that each is read once"
    assert not (shuffled(3, 3, 1000, 10) == order).all()


def test_refusals(folders, tmp_path):
    refused = [
        ({"folder": str(tmp_path)}, "holds no set"),
        ({"folder": folders["pathfinder"]}, "is a set of 'pathfinder', not of 'listops'"),
    ]
    for settings, sentence in refused:
        with pytest.raises(ValueError, match=sentence):
            tasks.get("listops", **settings).sample(1)
    with pytest.raises(ValueError, match="has resolution 64, not 128"):
        tasks.get("pathfinder-segmentation", folder=folders["pathfinder-segmentation"]).sample(1)
    with pytest.raises(ValueError, match="the length must be at least 64, not 3"):
        tasks.get("listops-subtrees", length=3)
    for wrong in ({"batch_size": 0}, {"batch_size": 1, "split": "dev"}):
        with pytest.raises(ValueError, match="must be"):
            tasks.get("listops").sample(**wrong)


@pytest.mark.parametrize("name", ["listops-subtrees", "listops", "pathfinder-segmentation"])
def test_previews(name, tmp_path):
    task_of(name).preview().savefig(tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 5000
