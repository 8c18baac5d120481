"""LRA Retrieval: import of pairs from TSV files, and the task."""

import csv
import io

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from releases import containers, hashes, refused, write_tar

from dlrnn.tasks import retrieval
from dlrnn.tasks.data import import_set
from dlrnn.tasks.retrieval import Retrieval
from dlrnn.tasks.storage import shards

COUNTS = {"train": 30, "eval": 10, "test": 8}


def pair(split, number):
    first = f'{split} {number}: a "quoted" text\twith a tab,\na line and ünïcode ' * (number * 10)
    label = (number % 2, float(number % 2))[number % 3 == 0]
    return [label, f"P{number}", f"Q{number}", first, f"second {number} " + "x" * 5000]


def tsv(split, count):
    text = io.StringIO(newline="")
    csv.writer(text, delimiter="\t").writerows(pair(split, number) for number in range(count))
    return text.getvalue().encode()


def files():
    found = {
        f"lra_release/tsv_data/new_aan_pairs.{split}.tsv": tsv(split, count)
        for split, count in COUNTS.items()
    }
    return {"lra_release/README.md": b"\xff", **found}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("retrieval")
    return import_set("retrieval", write_tar(path / "lra.tar.gz", files(), "w:gz"), path / "set")


def test_imported_pairs(folder):
    assert shards.verify(folder) == []
    counts = shards.load_manifest(folder)["counts"]
    assert counts == {"train": 30, "validation": 10, "test": 8}
    for name, split in (("train", "train"), ("eval", "validation"), ("test", "test")):
        table = pq.read_table(folder / f"{split}-00000.parquet")
        for number, sample in enumerate(table.to_pylist()):
            label, id1, id2, text1, text2 = pair(name, number)
            assert (sample["label"], sample["id1"], sample["id2"]) == (label, id1, id2)
            assert sample["tokens1"] == text1.encode()[:4000]
            assert sample["tokens2"] == text2.encode()[:4000]


def test_every_container_gives_the_same_shards(folder, tmp_path):
    for place, source in enumerate(containers(tmp_path, files())):
        assert hashes(import_set("retrieval", source, tmp_path / f"out{place}")) == hashes(folder)


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
    monkeypatch.setattr(retrieval, "MAX_LINE", 100_000)
    changed = {**files(), "lra_release/tsv_data/new_aan_pairs.test.tsv": data}
    path = write_tar(tmp_path / "lra.tar.xz", changed)
    where = "lra.tar.xz: .*new_aan_pairs.test.tsv " if data else ""
    refused("retrieval", path, tmp_path, where + keywords)


def test_batches_and_scores(folder):
    task = Retrieval(folder=folder)
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
