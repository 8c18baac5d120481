"""Tasks over sets: drawn on the spot or read from a folder, always the same batches."""

from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from numba.core.caching import NullCache
from numba.core.dispatcher import Dispatcher

from dlrnn import tasks
from dlrnn.tasks import (
    listops,
    listops_task,
    listops_trees,
    pathfinder,
    pathfinder_paths,
    pathfinder_pixels,
    search,
    sets,
    shards,
    streams,
)
from dlrnn.tasks.build import build_set
from dlrnn.tasks.listops_text import CLOSE
from dlrnn.tasks.sets import WINDOW, shuffled
from dlrnn.tasks.task import IGNORED

COUNTS = {"train": 50, "validation": 7, "test": 3}
SETS = {
    "listops": listops.lra(counts=COUNTS, shard_rows=40),
    "listops-subtrees": listops.subtrees(
        counts=COUNTS, shard_rows=40, min_length=218, max_length=255
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


def test_kernels_on_disk_have_one_signature():
    """Of several, processes that compile at once may write two into one file of numba's."""
    for name, spec in SETS.items():
        spec.draw("train", 0)
        task_of(name).sample(2)
    tasks.get("mips", length=8).sample(2)
    modules = listops_trees, pathfinder_paths, pathfinder_pixels, search, streams
    found = {
        f"{module.__name__}.{name}": len(kernel.signatures)
        for module in modules
        for name, kernel in vars(module).items()
        if isinstance(kernel, Dispatcher) and not isinstance(kernel._cache, NullCache)
    }
    assert len(found) == 4
    assert set(found.values()) == {1}


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


@pytest.mark.parametrize("name", [name for name, task in tasks.TASKS.items() if task.drawable])
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
    order = shuffled(3, 2, 1000, 500, 10)
    assert sorted(order) == list(range(1000))
    assert (order != np.arange(1000)).mean() > 0.9
    first = order[: WINDOW * 10] // 10
    assert len(set(first)) == WINDOW, "a window has whole groups, so that each is read once"
    assert not (shuffled(3, 3, 1000, 500, 10) == order).all()


def test_every_group_is_decoded_once_an_epoch(tmp_path, monkeypatch):
    """Also where a shard ends within a group: 16, 16 and 8 samples; two groups a window."""
    monkeypatch.setattr(listops.ListOps, "group_rows", 16)
    spec = tasks.get("listops-subtrees", length=64).spec()
    small = {"counts": {"train": 410}, "shard_rows": 40}
    folder = build_set(listops.subtrees(**spec.parameters, **small), tmp_path / "set")
    decoded, read_row_group = Counter(), pq.ParquetFile.read_row_group

    def counting(file, group, **options):
        table = read_row_group(file, group, **options)
        decoded[id(file), group] += 1
        assert table.nbytes < 4000
        return table

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", counting)
    monkeypatch.setattr(sets, "WINDOW", 2)
    monkeypatch.setattr(shards, "KEPT", 8000)
    shuffled.cache_clear()
    task = tasks.get("listops-subtrees", length=64, folder=folder)
    rows = [row for step in range(82) for row in task.sample(5, step=step).inputs]
    shuffled.cache_clear()
    assert len({row.numpy().tobytes() for row in rows}) == 410
    assert list(decoded.values()) == [1] * 31


def test_a_set_that_is_built_anew_is_noticed(tmp_path, monkeypatch):
    """In the same place, and in the same relative place of another folder."""
    for place, seed in (("here", 1), ("there", 2)):
        build_set(listops.lra(counts=COUNTS, seed=seed), tmp_path / place / "set")
    monkeypatch.chdir(tmp_path / "here")
    task = tasks.get("listops", folder="set")
    first = task.sample(3, split="test").inputs
    monkeypatch.chdir(tmp_path / "there")
    second = task.sample(3, split="test").inputs
    assert not torch.equal(first, second)
    monkeypatch.chdir(tmp_path / "here")
    assert torch.equal(task.sample(3, split="test").inputs, first)
    for path in Path("set").iterdir():
        path.unlink()
    with pytest.raises(ValueError, match="holds no set"):
        task.sample(3, split="test")
    build_set(listops.lra(counts=COUNTS, seed=2), "set")
    assert torch.equal(task.sample(3, split="test").inputs, second)


def test_a_folder_may_be_a_path(folders):
    task = tasks.get("listops", folder=Path(folders["listops"]))
    assert task == task_of("listops", folders)
    assert task.folder == folders["listops"]


def test_sets_with_other_parameters_are_refused(tmp_path):
    counts = {"train": 2}
    made = {
        "listops": (listops.lra(min_length=20, counts=counts), "has min_length 20, not 500"),
        "pathfinder": (pathfinder.lra(resolution=40, counts=counts), "has resolution 40, not 32"),
        "path-x": (pathfinder.path_x(resolution=140, counts=counts), "has resolution 140, not 128"),
    }
    for name, (spec, sentence) in made.items():
        folder = build_set(spec, tmp_path / name)
        with pytest.raises(ValueError, match=sentence):
            tasks.get(name, folder=folder).sample(1)


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        ({"step": -1}, "step must be a whole number of at least 0, not -1"),
        ({"first": -2, "of": 4}, "first must be a whole number of at least 0, not -2"),
        ({"of": 1}, "of, the whole batch, must be at least first . batch_size, 0 . 2, not 1"),
        ({"first": 3, "of": 4}, "must be at least first . batch_size, 3 . 2, not 4"),
        ({"first": 3}, "must be at least first . batch_size, 3 . 2, not 2"),
        ({"of": 0}, "must be at least first . batch_size, 0 . 2, not 0"),
    ],
)
def test_places_that_cannot_be(request_, sentence):
    with pytest.raises(ValueError, match=sentence):
        tasks.get("listops").sample(2, **request_)


def test_impossible_settings_are_refused_at_once():
    for name in ("listops", "pathfinder", "path-x"):
        with pytest.raises(ValueError, match=f"{name}: seed must be from"):
            tasks.get(name, seed=2**64)
    with pytest.raises(ValueError, match="resolution must be from 32 to 4096, not 31"):
        tasks.get("pathfinder-segmentation", resolution=31)
    for length in (3, 65_537):
        sentence = f"listops-subtrees: the length must be from 64 to 65536, not {length}"
        with pytest.raises(ValueError, match=sentence):
            tasks.get("listops-subtrees", length=length)


def test_lengths_scale_the_papers_limits():
    limits = [
        (spec.min_length, spec.max_length)
        for spec in (tasks.get("listops-subtrees", length=n).spec() for n in (8191, 8192, 8193))
    ]
    assert limits == [(6999, 8179), (7000, 8180), (7000, 8180)]
    for length in (64, 65_536):
        assert tasks.get("listops-subtrees", length=length).spec().max_length <= length


def test_refusals(folders, tmp_path):
    refused = [
        ({"folder": str(tmp_path)}, "holds no set"),
        ({"folder": str(tmp_path / "no")}, "there is no folder .*no"),
        ({"folder": folders["pathfinder"]}, "is a set of 'pathfinder', not of 'listops'"),
    ]
    for settings, sentence in refused:
        with pytest.raises(ValueError, match=sentence):
            tasks.get("listops", **settings).sample(1)
    with pytest.raises(ValueError, match="has resolution 64, not 128"):
        tasks.get("pathfinder-segmentation", folder=folders["pathfinder-segmentation"]).sample(1)
    for wrong in ({"batch_size": 0}, {"batch_size": 1, "split": "dev"}):
        with pytest.raises(ValueError, match="must be"):
            tasks.get("listops").sample(**wrong)


@pytest.mark.parametrize("name", ["listops-subtrees", "listops", "pathfinder-segmentation"])
def test_previews(name, tmp_path):
    task_of(name).preview().savefig(tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 5000


def test_previews_draw_what_the_task_has(monkeypatch):
    assert len(tasks.get("pathfinder").preview().axes) == 4
    assert len(task_of("pathfinder-segmentation").preview().axes) == 8
    bars, parsed = listops_task._bars, []
    monkeypatch.setattr(listops_task, "_bars", lambda tokens: parsed.append(1) or bars(tokens))
    task_of("listops-subtrees").preview()
    assert len(parsed) == 1
