"""LRA Text and Retrieval: import of reviews and pairs of papers, and the tasks."""

import csv
import io

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from releases import containers, hashes, parquet, refused, write_folder, write_tar

from dlrnn import tasks
from dlrnn.tasks import text
from dlrnn.tasks.data import import_set
from dlrnn.tasks.storage import shards
from dlrnn.tasks.storage.imports import write_set
from dlrnn.tasks.text import Retrieval, Text, text_set

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


def test_every_container_gives_the_same_shards(folder, pairs, tmp_path):
    there, *archives = containers(tmp_path / "text", reviews())
    for place, source in enumerate((there, there / "aclImdb", *archives)):
        assert hashes(import_set("text", source, tmp_path / f"text{place}")) == hashes(folder)
    for place, source in enumerate(containers(tmp_path / "pairs", papers())):
        assert hashes(import_set("retrieval", source, tmp_path / f"pairs{place}")) == hashes(pairs)


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


# ---------------------------------------------------------------------------------- retrieval

COUNTS = {"train": 30, "eval": 10, "test": 8}


def pair(split, number):
    first = f'{split} {number}: a "quoted" text\twith a tab,\na line and ünïcode ' * (number * 10)
    label = (number % 2, float(number % 2))[number % 3 == 0]
    return [label, f"P{number}", f"Q{number}", first, f"second {number} " + "x" * 5000]


def tsv(split, count):
    file = io.StringIO(newline="")
    csv.writer(file, delimiter="\t").writerows(pair(split, number) for number in range(count))
    return file.getvalue().encode()


def papers():
    found = {
        f"lra_release/tsv_data/new_aan_pairs.{split}.tsv": tsv(split, count)
        for split, count in COUNTS.items()
    }
    return {"lra_release/README.md": b"\xff", **found}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    path = tmp_path_factory.mktemp("retrieval")
    return import_set("retrieval", write_tar(path / "lra.tar.gz", papers(), "w:gz"), path / "set")


def test_imported_pairs(pairs):
    assert shards.verify(pairs) == []
    counts = shards.load_manifest(pairs)["counts"]
    assert counts == {"train": 30, "validation": 10, "test": 8}
    for name, split in (("train", "train"), ("eval", "validation"), ("test", "test")):
        table = pq.read_table(pairs / f"{split}-00000.parquet")
        for number, sample in enumerate(table.to_pylist()):
            label, id1, id2, text1, text2 = pair(name, number)
            assert (sample["label"], sample["id1"], sample["id2"]) == (label, id1, id2)
            assert sample["tokens1"] == text1.encode()[:4000]
            assert sample["tokens2"] == text2.encode()[:4000]


@pytest.mark.parametrize(
    ("data", "keywords"),
    [
        (b"1\ta\tb\tx\ty\n2\ta\tb\tx\ty\n", "line 2 has the label '2'"),
        (b'1\ta\tb\t"x\n\nx"\ty\n1\ta\tb\tx\n', "line 4 has 4 columns; expected 5"),
        (b'1\ta\tb\tx\ty\n1\ta\tb\t"x\ty\n', "line 2 is damaged: unexpected end of data"),
        (b'1\ta\tb\t"x"x\ty\n', "line 1 is damaged: "),
        (b"1\ta\tb\tx\ty\n1\ta\tb\tx\xff\ty\n", "line 2 is not UTF-8"),
        (b"1\ta\tb\tx\ty\n\n", "line 2 has 0 columns"),
        (b"1\ta\tb\t" + b"x" * 200_000, "line 1 is longer than 100000 bytes"),
        (b"", "no test samples of retrieval; new_aan_pairs.{train,eval,test}.tsv"),
    ],
)
def test_invalid_pairs_are_refused(tmp_path, monkeypatch, data, keywords):
    monkeypatch.setattr(text, "MAX_LINE", 100_000)
    changed = {**papers(), "lra_release/tsv_data/new_aan_pairs.test.tsv": data}
    path = write_tar(tmp_path / "lra.tar.xz", changed)
    where = "lra.tar.xz: .*new_aan_pairs.test.tsv " if data else ""
    refused("retrieval", path, tmp_path, where + keywords)


def test_batches_and_scores_of_pairs(pairs):
    task = Retrieval(folder=pairs)
    sizes = task.vocabulary, task.d_output, task.input_length, task.output_length
    assert sizes == (257, 2, 4000, 1)
    assert task.pair
    assert task.pooled
    batch = task.sample(8, split="test")
    assert (batch.inputs.shape, batch.lengths.shape) == ((8, 2, 4000), (8, 2))
    assert batch.targets.tolist() == [0, 1] * 4
    for number in range(8):
        for place in (0, 1):
            text = pair("test", number)[3 + place].encode()[:4000]
            tokens, length = batch.inputs[number, place].numpy(), int(batch.lengths[number, place])
            assert length == max(len(text), 1)  # the first text of pair 0 is empty
            assert np.array_equal(tokens[: len(text)] - 1, np.frombuffer(text, dtype=np.uint8))
            assert not tokens[len(text) :].any()
    logits = torch.nn.functional.one_hot(batch.targets, 2).double()
    assert task.metrics(logits, batch)["accuracy"] == 1
    assert len(task.preview().axes) == 2
