"""LRA Text: reviews from folders and archives, and the task over them."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from test_archives import write_folder, write_tar, write_zip

from dlrnn.tasks import shards
from dlrnn.tasks.imports import import_set, write_set
from dlrnn.tasks.text import Text, text_set

LONG = "Grüße & $x$ from a gem of a film. " * 100  # 3500 bytes


def reviews():
    """24 of each split and label, and what else is in the official archive."""
    files = {"aclImdb/README": b"\xff", "aclImdb/train/urls_pos.txt": b"http", "aclImdb/.DS": b""}
    files["aclImdb/train/unsup/0_0.txt"] = b"nobody knows"
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


def test_what_is_imported(folder):
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


def test_the_same_shards_whatever_holds_the_files(folder, tmp_path):
    there = write_folder(tmp_path / "there", reviews())
    expected = [entry["sha256"] for entry in shards.load_manifest(folder)["shards"]]
    for place, source in enumerate(
        (
            there,
            there / "aclImdb",
            write_zip(tmp_path / "imdb.zip", reviews()),
            write_tar(tmp_path / "imdb.tar.gz", dict(reversed(reviews().items())), "w:gz"),
        )
    ):
        out = import_set("text", source, tmp_path / f"out{place}")
        assert [entry["sha256"] for entry in shards.load_manifest(out)["shards"]] == expected


@pytest.mark.parametrize(
    ("name", "data", "sentence"),
    [
        ("aclImdb/train/pos/99_7.txt", b"caf\xe9", "train/pos/99_7.txt is not UTF-8"),
        ("aclImdb/train/pos/99_7.txt", b"a" * 70_000 + b"\xc3", "train/pos/99_7.txt is not UTF-8"),
        ("aclImdb/train/pos/99_7.txt", b"", "aclImdb/train/pos/99_7.txt is empty"),
        ("aclImdb/test/good/99_7.txt", b"x", "good/99_7.txt has the label 'good'; neg and pos"),
        ("aclImdb/test/pos/new.txt", b"x", "aclImdb/test/pos/new.txt is not named ID_RATING.txt"),
        ("copy/train/pos/0_0.txt", b"x", "train/pos/0_0 is there twice"),
        ("../train/pos/99_7.txt", b"x", "holds '../train/pos/99_7.txt', whose path climbs out"),
    ],
)
def test_what_cannot_be_imported(tmp_path, name, data, sentence):
    path = write_tar(tmp_path / "imdb.tar.xz", {**reviews(), name: data})
    with pytest.raises(ValueError, match=sentence) as caught:
        import_set("text", path, tmp_path / "out")
    assert "imdb.tar.xz" in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("label", "sentence"),
    [
        ([1], "has lists in its column 'label'"),
        ({"a": 1}, "row 0 has the label {'a': 1}; 0 and 1 are known"),
        (True, "row 0 has the label True; 0 and 1 are known"),
        (1.0, "row 0 has the label 1.0; 0 and 1 are known"),
        (None, "row 0 has the label None; 0 and 1 are known"),
    ],
)
def test_labels_of_parquet_that_cannot_be(tmp_path, label, sentence):
    name = "train-00000-of-00001.parquet"
    (tmp_path / "imdb").mkdir()
    pq.write_table(pa.table({"text": ["good"], "label": [label]}), tmp_path / "imdb" / name)
    with pytest.raises(ValueError, match=f"{name} {sentence}"):
        import_set("text", tmp_path / "imdb", tmp_path / "out")


def test_a_truncated_archive_and_an_empty_one(tmp_path):
    path = write_tar(tmp_path / "imdb.tar.xz", reviews())
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"imdb.tar.xz is damaged"):
        import_set("text", path, tmp_path / "out")
    write_tar(path, {"README": b""})
    with pytest.raises(
        ValueError, match=r"holds no train samples of text; aclImdb/\{train,test\}/"
    ):
        import_set("text", path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_task(folder):
    task = Text(folder=folder)
    assert (task.vocabulary, task.d_output, task.input_length, task.output_length) == (
        257,
        2,
        2048,
        1,
    )
    assert task.count("test") == 48
    batch = task.sample(48, split="test")
    assert batch.inputs.shape == (48, 2048)
    assert batch.inputs.dtype == torch.int64
    for tokens, label, length, row in zip(
        *batch_parts(batch), samples(folder)["test"], strict=True
    ):
        assert length == len(row["tokens"])
        assert np.array_equal(tokens[:length] - 1, list(row["tokens"]))
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


def batch_parts(batch):
    return batch.inputs.numpy(), batch.targets.tolist(), batch.lengths.tolist()


def test_other_lengths(folder, tmp_path):
    batch = Text(folder=folder, length=100).sample(8)
    assert batch.inputs.shape == (8, 100)
    assert batch.lengths.max() == 100
    with pytest.raises(ValueError, match="has texts cut to length 2048, not to 4096"):
        Text(folder=folder, length=4096).sample(8)
    source = write_tar(tmp_path / "imdb.tar.xz", reviews())
    longer = write_set(text_set(4096), source, tmp_path / "longer")
    assert Text(folder=longer, length=4096).sample(48, split="test").lengths.max() > 2048
    for length in (0, 2**20 + 1):
        with pytest.raises(
            ValueError, match=f"text: the length must be from 1 to .*, not {length}"
        ):
            Text(length=length)


def test_without_a_set(folder):
    task = Text()
    assert task.count("train") is None
    with pytest.raises(ValueError, match=r"text is real data, .* `dlrnn data import text PATH`"):
        task.sample(4)
