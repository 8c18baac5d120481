"""Tasks with data sets: generated or read from disk, the batches are the same."""

import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numba.core.caching import NullCache
from numba.core.dispatcher import Dispatcher

from dlrnn import tasks
from dlrnn.tasks import listops, numba_random, pathfinder
from dlrnn.tasks.atomic import operations
from dlrnn.tasks.base import IGNORED
from dlrnn.tasks.listops import trees
from dlrnn.tasks.listops.text import CLOSE
from dlrnn.tasks.pathfinder import paths, pixels, stamps
from dlrnn.tasks.storage import sets, shards
from dlrnn.tasks.storage.build import build_set
from dlrnn.tasks.storage.sets import WINDOW, shuffled

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


def test_cached_kernels_have_one_signature():
    """With several, two processes that compile at once could write to one cache file."""
    for name, spec in SETS.items():
        spec.draw("train", 0)
        task_of(name).sample(2)
    tasks.get("mips", length=8).sample(2)
    modules = trees, paths, pixels, stamps, operations, numba_random
    found = {
        f"{module.__name__}.{name}": len(kernel.signatures)
        for module in modules
        for name, kernel in vars(module).items()
        if isinstance(kernel, Dispatcher) and not isinstance(kernel._cache, NullCache)
    }
    assert len(found) == 7
    assert set(found.values()) == {1}


@pytest.mark.parametrize("name", SETS)
def test_held_out_samples_on_disk_equal_generated_ones(name, folders):
    drawn, stored = task_of(name), task_of(name, folders)
    assert replace(stored, folder=Path(stored.folder)) == stored
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
def test_parts_of_a_batch_equal_the_whole(name, on_disk, folders):
    task = task_of(name, folders if on_disk else None)
    whole = task.sample(6, step=3)
    parts = [task.sample(2, step=3, first=first, of=6) for first in (0, 2, 4)]
    for k, part in enumerate(whole):
        if part is not None:
            assert torch.equal(part, torch.cat([p[k] for p in parts]))


@pytest.mark.parametrize("name", [name for name, task in tasks.TASKS.items() if task.drawable])
def test_batches_have_the_sizes_of_the_task(name):
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


def test_listops_targets_are_the_values_of_sub_trees():
    task = tasks.get("listops-subtrees", length=512)
    batch = task.sample(3)
    for tokens, targets in zip(batch.inputs.numpy(), batch.targets.numpy(), strict=True):
        assert ((targets != IGNORED) == (tokens == CLOSE)).all()
        text = listops.to_text(tokens.astype(np.uint8))
        assert targets[targets != IGNORED].tolist() == listops.sub_values(text)


def test_listops_target_is_the_value_of_the_expression():
    task = tasks.get("listops")
    batch = task.sample(3)
    for tokens, target, length in zip(*batch, strict=True):
        assert (tokens[:length] > 0).all()
        assert not tokens[length:].any()
        assert listops.evaluate(listops.to_text(tokens.numpy().astype(np.uint8))) == target


def test_pathfinder_batches_are_the_generated_images():
    task = tasks.get("pathfinder-segmentation", resolution=64)
    batch, images = task.sample(3), [task.spec().draw("train", k) for k in range(3)]
    for levels, mask, image in zip(batch.inputs, batch.targets, images, strict=True):
        back = ((levels[:, 0] + 1) * 127.5).round().to(torch.uint8)
        assert (back.numpy() == image.pixels.ravel()).all()
        assert (mask.numpy() == image.mask.ravel()).all()


def test_an_epoch_is_a_permutation_within_windows():
    order = shuffled(3, 2, 1000, 500, 10)
    assert sorted(order) == list(range(1000))
    assert (order != np.arange(1000)).mean() > 0.9
    first = order[: WINDOW * 10] // 10
    assert len(set(first)) == WINDOW, "a window has whole groups, so that each is read once"
    assert not (shuffled(3, 3, 1000, 500, 10) == order).all()


def test_every_group_is_decoded_once_per_epoch(tmp_path, monkeypatch):
    """A shard has groups of 16, 16 and 8 samples, a window two groups."""
    monkeypatch.setattr(listops.ListOpsGenerator, "group_rows", 16)
    spec = tasks.get("listops-subtrees", length=64).spec()
    small = {"counts": {"train": 410}, "shard_rows": 40}
    folder = build_set(listops.subtrees(**spec.parameters, **small), tmp_path / "set")
    decoded, read_group = Counter(), shards.read_group

    def counting(file, path, group, *options):
        table = read_group(file, path, group, *options)
        decoded[path, group] += 1
        assert table.nbytes < 4000
        return table

    monkeypatch.setattr(shards, "read_group", counting)
    monkeypatch.setattr(sets, "WINDOW", 2)
    monkeypatch.setattr(shards, "CACHE_BYTES", 8000)
    shuffled.cache_clear()
    task = tasks.get("listops-subtrees", length=64, folder=folder)
    rows = [row for step in range(82) for row in task.sample(5, step=step).inputs]
    shuffled.cache_clear()
    assert len({row.numpy().tobytes() for row in rows}) == 410
    assert list(decoded.values()) == [1] * 31


def test_a_rebuilt_data_set_is_read_again(tmp_path, monkeypatch):
    """It is in the same folder, or in the same relative folder of another directory."""
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


@pytest.mark.parametrize(
    ("request_", "keywords"),
    [
        ({"of": 1}, "at least first . batch_size, 0 . 2, not 1"),
        ({"first": 3, "of": 4}, "at least first . batch_size, 3 . 2, not 4"),
        ({"first": 3}, "at least first . batch_size, 3 . 2, not 2"),
        ({"of": 0}, "at least first . batch_size, 0 . 2, not 0"),
    ],
)
def test_parts_outside_the_batch_are_refused(request_, keywords):
    with pytest.raises(ValueError, match=keywords):
        tasks.get("listops").sample(2, **request_)


def test_length_scales_the_limits_of_the_paper():
    limits = [
        (spec.min_length, spec.max_length)
        for spec in (tasks.get("listops-subtrees", length=n).spec() for n in (8191, 8192, 8193))
    ]
    assert limits == [(6999, 8179), (7000, 8180), (7000, 8180)]
    for length in (64, 65_536):
        assert tasks.get("listops-subtrees", length=length).spec().max_length <= length


def test_folders_of_another_data_set_are_refused(folders, tmp_path):
    short = build_set(listops.lra(min_length=20, counts={"train": 2}), tmp_path / "short")
    wide = build_set(pathfinder.path_x(resolution=140, counts={"train": 2}), tmp_path / "wide")
    for name, folder, keywords in (
        ("listops", tmp_path, "holds no set"),
        ("listops", tmp_path / "no", "there is no folder .*no"),
        ("listops", folders["pathfinder"], "pathfinder', not of 'listops'"),
        ("listops", short, "has min_length 20, not 500"),
        ("path-x", wide, "has resolution 140, not 128"),
        ("pathfinder-segmentation", folders["pathfinder-segmentation"], "has resolution 64, not"),
    ):
        with pytest.raises(ValueError, match=keywords):
            tasks.get(name, folder=folder).sample(1)


@pytest.mark.parametrize(("name", "rows"), [("pathfinder", 1), ("pathfinder-segmentation", 2)])
def test_pathfinder_previews_show_images_and_masks(name, rows, tmp_path):
    task = task_of(name)
    spec, figure = task.spec(), task.preview()
    figure.savefig(tmp_path / "a.png")
    assert len(figure.axes) == 4 * rows
    size = (spec.resolution,) * 2
    shown = [np.asarray(each.images[0].get_array()).reshape(size) for each in figure.axes]
    images = [spec.draw("train", k) for k in range(4)]
    assert ((shown[0] + 1) * 127.5).round().astype(int).tolist() == images[0].pixels.tolist()
    assert rows == 1 or shown[4].tolist() == images[0].mask.tolist()
    titles = [each.get_title() for each in figure.axes[:4]]
    assert [title == "connected" for title in titles] == [bool(image.label) for image in images]


@pytest.mark.parametrize("name", ["listops-subtrees", "listops"])
def test_listops_previews_draw_every_sub_tree(name, tmp_path):
    task = task_of(name)
    figure = task.preview()
    figure.savefig(tmp_path / "a.png")
    assert len(figure.axes[0].patches) == (task.sample(1).inputs == CLOSE).sum()


def test_steps_of_32_bits_do_not_overflow(unchecked):
    task = tasks.get("listops")
    far = task.sample(2, step=2**29)
    assert torch.equal(task.sample(2, step=np.int32(2**29)).inputs, far.inputs)


@pytest.mark.parametrize("place", [5, 100, -300, -1])
def test_a_flipped_bit_of_a_shard_is_found_when_it_is_read(folders, place, tmp_path):
    """Without hashes, half of such shards would be read as other samples."""
    folder = shutil.copytree(folders["listops"], tmp_path / "set")
    path = next(folder.glob("train-*.parquet"))
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"train-.*\.parquet is damaged .*`dlrnn data verify"):
        tasks.get("listops", folder=str(folder)).sample(50)
    path.unlink()
    with pytest.raises(ValueError, match=r"is missing: .* again"):
        tasks.get("listops", folder=str(folder)).sample(50)
    task_of("listops", folders).sample(4)
