"""LRA Text: import of reviews from folders and archives, and the task."""

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from releases import containers, hashes, parquet, refused, write_folder, write_tar

from dlrnn import tasks
from dlrnn.tasks.data import import_set
from dlrnn.tasks.storage import shards
from dlrnn.tasks.storage.imports import write_set
from dlrnn.tasks.text import Text, text_set

LONG = "Grüße & $x$ from a gem of a film. " * 100  # 3500 bytes


def reviews():
    """24 reviews of each split and label, and the other files of the official archive."""
    files = {"aclImdb/README": b"\xff", "aclImdb/train/urls_pos.txt": b"http", "aclImdb/.DS": b""}
    files["aclImdb/train/unsup/0_0.txt"] = b"no label"
    files["aclImdb/train/pos/._0_0.txt"] = b"\xff"
    for split in ("train", "test"):
        for label in ("pos", "neg"):
            for number in range(24):
                name = f"aclImdb/{split}/{label}/{number}_{number % 10}.txt"
                files[name] = f"{split} {label} {number} ".encode() + LONG.encode()[: 200 * number]
    return files


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("text")
    return import_set("text", write_tar(path / "imdb.tar.xz", reviews()), path / "set")


def samples(folder):
    return {
        split: pq.read_table(folder / f"{split}-00000.parquet").to_pylist()
        for split in ("train", "validation", "test")
    }


def test_imported_reviews(folder):
    assert shards.verify(folder) == []
    found, files = samples(folder), reviews()
    names = [sample["review"] for split in found.values() for sample in split]
    assert len(set(names)) == len(names) == 96
    assert len(found["test"]) == 48
    assert 1 <= len(found["validation"]) <= 12
    for split, rows in found.items():
        for row in rows:
            official, label, _ = row["review"].split("/")
            assert official == ("test" if split == "test" else "train")
            assert row["label"] == (label == "pos")
            text = files[f"aclImdb/{row['review']}.txt"]
            assert row["tokens"] == text[:2048]


def test_every_container_gives_the_same_shards(folder, tmp_path):
    there, *archives = containers(tmp_path, reviews())
    for place, source in enumerate((there, there / "aclImdb", *archives)):
        assert hashes(import_set("text", source, tmp_path / f"out{place}")) == hashes(folder)


@pytest.mark.parametrize(
    ("name", "data", "keywords"),
    [
        ("aclImdb/train/pos/99_7.txt", b"caf\xe9", "train/pos/99_7.txt is not UTF-8"),
        ("aclImdb/train/pos/99_7.txt", b"a" * 70_000 + b"\xc3", "train/pos/99_7.txt is not UTF-8"),
        ("aclImdb/train/pos/99_7.txt", b"", "aclImdb/train/pos/99_7.txt is empty"),
        ("aclImdb/test/good/99_7.txt", b"x", "good/99_7.txt has the label 'good'"),
        ("aclImdb/test/pos/new.txt", b"x", "aclImdb/test/pos/new.txt is not named ID_RATING.txt"),
        ("copy/train/pos/0_0.txt", b"x", "train/pos/0_0 occurs twice"),
    ],
)
def test_invalid_reviews_are_refused(tmp_path, name, data, keywords):
    path = write_tar(tmp_path / "imdb.tar.xz", {**reviews(), name: data})
    refused("text", path, tmp_path, keywords)


@pytest.mark.parametrize(
    ("label", "keywords"),
    [
        ([1], "has lists in its column 'label'"),
        ({"a": 1}, "row 0 has the label {'a': 1}"),
        (True, "row 0 has the label True"),
        (1.0, "row 0 has the label 1.0"),
        (None, "row 0 has the label None"),
    ],
)
def test_invalid_labels_in_parquet_are_refused(tmp_path, label, keywords):
    name = "train-00000-of-00001.parquet"
    files = {name: parquet({"text": ["good"], "label": [label]})}
    refused("text", write_folder(tmp_path / "imdb", files), tmp_path, f"{name} {keywords}")


def test_truncated_and_empty_archives_are_refused(tmp_path):
    path = write_tar(tmp_path / "imdb.tar.xz", reviews())
    path.write_bytes(path.read_bytes()[:-100])
    refused("text", path, tmp_path, r"imdb.tar.xz is damaged")
    write_tar(path, {"README": b""})
    refused("text", path, tmp_path, r"no train samples of text; aclImdb/\{train,test\}/")


def test_batches_and_scores(folder):
    task = Text(folder=folder)
    sizes = task.vocabulary, task.d_output, task.input_length, task.output_length
    assert sizes == (257, 2, 2048, 1)
    assert task.count("test") == 48
    batch = task.sample(48, split="test")
    assert batch.inputs.shape == (48, 2048)
    assert batch.inputs.dtype == torch.int64
    for tokens, label, length, row in zip(*batch, samples(folder)["test"], strict=True):
        assert length == len(row["tokens"])
        assert (tokens[:length] - 1).tolist() == list(row["tokens"])
        assert not tokens[length:].any()
        assert label == row["label"]
    assert batch.lengths.max() == 2048
    logits = torch.nn.functional.one_hot(batch.targets, 2).double()
    assert task.metrics(logits, batch)["accuracy"] == 1
    assert task.loss(logits, batch).item() == pytest.approx(np.log(1 + np.exp(-1)))
    parts = [task.sample(24, split="test", first=first, of=48) for first in (0, 24)]
    halves = [task.loss(logits[:24], parts[0], task.totals(batch))]
    halves += [task.loss(logits[24:], parts[1], task.totals(batch))]
    assert sum(halves).item() == pytest.approx(task.loss(logits, batch).item())
    assert len(task.preview().axes) == 1


def test_texts_are_cut_to_the_length(folder, tmp_path):
    batch = Text(folder=folder, length=100).sample(8)
    assert batch.inputs.shape == (8, 100)
    assert batch.lengths.max() == 100
    with pytest.raises(ValueError, match="cut to length 2048, not to 4096"):
        Text(folder=folder, length=4096).sample(8)
    source = write_tar(tmp_path / "imdb.tar.xz", reviews())
    longer = write_set(text_set(4096), source, tmp_path / "longer")
    assert Text(folder=longer, length=4096).sample(48, split="test").lengths.max() > 2048


@pytest.mark.parametrize("name", ["text", "retrieval", "speech-commands", "pg19"])
def test_real_data_needs_a_folder(name):
    task = tasks.get(name)
    assert task.count("train") is None
    with pytest.raises(ValueError, match=f"{name} is real data.* `dlrnn data import {name} PATH`"):
        task.sample(4)
