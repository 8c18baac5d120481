"""Requests and files that are not as they should be."""

import io
import json
import shutil

import numpy as np
import pytest
import torch

from dlrnn import tasks
from dlrnn.cli import main
from dlrnn.tasks.archives import entries
from dlrnn.tasks.books import _hashed
from dlrnn.tasks.layouts import text_lines


@pytest.fixture(scope="module")
def listops(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sets") / "listops"
    assert main(["data", "build", "listops", "--samples", "12", "--out", str(folder)]) == 0
    return folder


@pytest.mark.parametrize("place", [5, 100, -300, -1])
def test_one_bit_of_a_shard_is_noticed(listops, place, tmp_path):
    """Half of such sets would be read without a word, as other samples."""
    folder = shutil.copytree(listops, tmp_path / "set")
    path = next(folder.glob("train-*.parquet"))
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    sentence = r"train-.*\.parquet is damaged \(.*\): `dlrnn data verify .*` looks at every"
    with pytest.raises(ValueError, match=sentence):
        tasks.get("listops", folder=str(folder)).sample(4)
    path.unlink()
    with pytest.raises(ValueError, match="is missing: run its build or its import again"):
        tasks.get("listops", folder=str(folder)).sample(4)
    tasks.get("listops", folder=str(listops)).sample(4)


@pytest.mark.parametrize("name", ["shift", "listops"])
@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        ({"batch_size": 1.5}, "batch_size must be a whole number of at least 1, not 1.5"),
        ({"batch_size": True}, "batch_size must be a whole number of at least 1, not True"),
        ({"step": 1.5}, "step must be a whole number of at least 0, not 1.5"),
        ({"step": np.int64(-3)}, r"step must be a whole number of at least 0, not np.int64\(-3\)"),
        ({"step": torch.tensor([1, 2])}, "step, if it is a tensor, must be one number of int64"),
        ({"step": torch.tensor(1.0)}, "step, if it is a tensor, must be one number of int64"),
        ({"first": "1"}, "first must be a whole number of at least 0, not '1'"),
    ],
    ids=str,
)
def test_requests_that_cannot_be(name, request_, sentence, unchecked):
    task = tasks.get(name, length=64) if name == "shift" else tasks.get(name)
    with pytest.raises(ValueError, match=sentence):
        task.sample(**{"batch_size": 2, **request_})


def test_steps_of_few_bits_do_not_wrap(unchecked):
    task = tasks.get("listops")
    far = task.sample(2, step=2**29)
    assert torch.equal(task.sample(2, step=np.int32(2**29)).inputs, far.inputs)


@pytest.mark.parametrize("name", [task.name for task in tasks.ATOMIC])
def test_batches_do_not_know_the_default_dtype(name):
    batch = tasks.get(name).sample(1)
    torch.set_default_dtype(torch.float64)
    try:
        again = tasks.get(name).sample(1)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(batch.inputs, again.inputs)
    assert torch.equal(batch.targets, again.targets)


@pytest.mark.parametrize("shape", [(3, 128, 8), (64, 8), (3,), (3, 65, 8)])
def test_an_output_of_another_length(shape, unchecked):
    task = tasks.get("shift", length=64)
    batch = task.sample(3)
    with pytest.raises(ValueError, match=r"the output must have the shape \[3, 64, 8\], not"):
        task.loss(torch.zeros(shape), batch)


def test_surprises_have_the_shape_of_the_targets(unchecked):
    task = tasks.get("pg19", length=4)
    tokens = torch.zeros(2, 4, dtype=torch.long)
    batch = tasks.Batch(tokens, tokens)
    assert task.loss(torch.ones(2, 4), batch) == 1
    for wrong in ((2, 4, 9), (1, 4), ()):
        with pytest.raises(ValueError, match=r"pg19: the output must have the shape \[2, 4\], not"):
            task.loss(torch.ones(wrong), batch)


def test_names_that_are_none(unchecked):
    for wrong in (None, 3):
        with pytest.raises(ValueError, match=f"there is no task {wrong}"):
            tasks.get(wrong)


def test_a_list_of_sets_survives_odd_manifests(listops, tmp_path, capsys, monkeypatch):
    tmp_path = tmp_path / "data"
    for name, content in (
        ("odd", {"task": "x", "counts": [1], "seed": 0}),
        ("edited", json.loads((listops / "manifest.json").read_text()) | {"seed": 7}),
    ):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "manifest.json").write_text(json.dumps(content))
    (tmp_path / "folder" / "manifest.json").mkdir(parents=True)
    capsys.readouterr()
    monkeypatch.chdir(tmp_path.parent)
    assert main(["data", "list", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["task"], row["state"]) == ("listops", "damaged")


def test_a_mark_at_the_start_of_a_text_is_no_text():
    file = io.BufferedReader(io.BytesIO("\ufeffa\n\ufeffb".encode()))
    assert list(text_lines("here", file)) == ["a\n", "\ufeffb"]


def test_one_file_can_be_sought_in(tmp_path):
    """Parquet must be; inside an archive it cannot."""
    (tmp_path / "a.parquet").write_bytes(b"abc")
    for entry in entries(tmp_path / "a.parquet"):
        assert (entry.name, entry.size) == ("a.parquet", 3)
        assert entry.open().seekable()
    with pytest.raises(ValueError, match=r"'a\.parquet' of 3 bytes, more than the 2 allowed"):
        list(entries(tmp_path / "a.parquet", member_bytes=2))


def test_books_with_names_that_are_no_text():
    assert _hashed("caf\udce9.txt") in ("train", "validation", "test")


def test_a_preview_of_no_step():
    with pytest.raises(ValueError, match="step must be a whole number of at least 0, not -1"):
        tasks.get("pathfinder-segmentation", resolution=32).preview(step=-1)
