"""Imported data sets: complete or absent, the same bytes after any interruption."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from releases import content

from dlrnn.tasks.data import import_set, imported_sets, list_sets
from dlrnn.tasks.storage import shards
from dlrnn.tasks.storage.build import locked
from dlrnn.tasks.storage.imports import write_set
from dlrnn.tasks.storage.specs import ImportedSet

SCHEMA = pa.schema([pa.field("number", pa.int64(), False), pa.field("data", pa.binary(), False)])


def numbers(path):
    """A line is a split and a number."""
    for line in path.read_text().splitlines():
        split, number = line.split()
        yield split, {"number": int(number), "data": b"x" * int(number)}


SPEC = ImportedSet(
    name="numbers",
    parameters={"length": 100},
    rows=numbers,
    schema=SCHEMA,
    layout="lines of splits and numbers",
    splits=("train", "test"),
    shard_rows=10,
    group_rows=4,
)


@pytest.fixture
def source(tmp_path):
    lines = [f"{('train', 'train', 'test')[k % 3]} {k * 7 % 36}\n" for k in range(36)]
    (tmp_path / "numbers.txt").write_text("".join(lines))
    return tmp_path / "numbers.txt"


@pytest.fixture
def whole(source, tmp_path):
    return write_set(SPEC, source, tmp_path / "sets" / "whole")


def test_files_and_manifest_of_an_import(whole, source):
    names = ["train-00000.parquet", "train-00001.parquet", "train-00002.parquet"]
    names += ["test-00000.parquet", "test-00001.parquet"]
    assert set(content(whole)) == {*names, "manifest.json"}
    assert shards.verify(whole) == []
    manifest = shards.load_manifest(whole)
    assert [entry["file"] for entry in manifest["shards"]] == names
    assert manifest["counts"] == {"train": 24, "validation": 0, "test": 12}
    source_of = {"source": "numbers.txt", "source_bytes": source.stat().st_size}
    assert manifest["parameters"] == {"length": 100, **source_of}
    train = shards.Split(whole, "train")
    assert (train.shard_rows, train.group_rows) == (10, 4)
    expected = [row["number"] for split, row in numbers(source) if split == "train"]
    assert [sample["number"] for sample in train] == expected
    assert all(np.all(sample["data"] == ord("x")) for sample in train)
    (row,) = list_sets(whole)
    assert (row["task"], row["samples"], row["state"]) == ("numbers", 36, "built")


def test_samples_of_a_shard_can_be_sorted(source, tmp_path):
    spec = replace(SPEC, order=lambda row: row["number"])
    out = write_set(spec, source, tmp_path / "sorted")
    found = [sample["number"] for sample in shards.Split(out, "test")]
    assert found == sorted(found[:10]) + sorted(found[10:])


def test_importing_again_changes_nothing_or_repairs(whole, source):
    before = {path: path.stat().st_mtime_ns for path in whole.iterdir()}
    write_set(SPEC, source, whole)
    assert {path: path.stat().st_mtime_ns for path in whole.iterdir()} == before
    expected = content(whole)
    (whole / "test-00000.parquet").write_bytes(b"not this")
    (whole / "train-00001.parquet").unlink()
    write_set(SPEC, source, whole)
    assert content(whole) == expected


def test_progress_reports_samples(source, tmp_path):
    source.write_text("train 1\ntest 2\n" * 1500)
    seen = []
    write_set(SPEC, source, tmp_path / "out", progress=lambda *now: seen.append(now))
    assert seen == [(1000, None), (2000, None), (3000, None), (3000, None)]


# ---------------------------------------------------------------------------------- refusals


def refused(source, out, keywords, spec=SPEC):
    before = content(out) if out.is_dir() else out.exists()
    with pytest.raises(ValueError, match=keywords) as caught:
        write_set(spec, source, out)
    assert "\n" not in str(caught.value)
    assert (content(out) if out.is_dir() else out.exists()) == before


def test_a_failed_import_leaves_nothing(source, tmp_path):
    def failing(path):
        yield from numbers(path)
        raise ValueError("line 37 is wrong")

    refused(source, tmp_path / "new" / "out", "line 37 is wrong", replace(SPEC, rows=failing))
    assert not (tmp_path / "new").exists()
    (tmp_path / "empty").mkdir()
    refused(source, tmp_path / "empty", "line 37 is wrong", replace(SPEC, rows=failing))
    source.write_text("train 5\n" * 30)
    refused(source, tmp_path / "new", "holds no test samples of numbers; lines of splits")
    source.write_text("")
    refused(source, tmp_path / "new", "holds no train samples of numbers; lines of splits")
    refused(tmp_path / "no", tmp_path / "new", "there is no file or folder")


def test_folders_with_other_content_are_refused(whole, source, tmp_path):
    refused(source, whole, "holds another set .its parameters", replace(SPEC, parameters={}))
    refused(source, whole, "holds another set .its task", replace(SPEC, name="letters"))
    refused(source, source / "sub", "numbers.txt is a file; a folder was expected")
    refused(tmp_path, tmp_path / "out", "is inside ")
    with locked(whole):
        refused(source, whole, "another process is building")
    source.write_text(source.read_text() + "train 5\n")
    refused(source, whole, "holds another set .its parameters .*source_bytes")
    (whole / "manifest.json").unlink()
    refused(source, whole, "holds shards of an unknown set")
    (whole / "thesis.tex").touch()
    refused(source, whole, "holds 'thesis.tex', which belongs to no set")


def test_an_unfinished_import_starts_over_also_with_other_versions(whole, source, tmp_path):
    begun = Path(shutil.copytree(whole, tmp_path / "begun"))
    manifest = shards.load_manifest(begun)
    header = {key: value for key, value in manifest.items() if key not in ("shards", "sha256")}
    header |= {"counts": dict.fromkeys(header["counts"], 0), "versions": {"pyarrow": "1.0"}}
    (begun / "progress.jsonl").write_text(json.dumps(header) + "\n")
    (begun / "manifest.json").unlink()
    (begun / "train-00007.parquet.part").touch()
    assert shards.verify(begun) == [f"{begun} was not built to its end; run its build again"]
    assert list_sets(begun)[0]["state"] == "not finished"
    assert content(write_set(SPEC, source, begun)) == content(whole)


def test_imported_data_sets_by_name(tmp_path):
    for name, spec in imported_sets().items():
        assert spec.name == name
    with pytest.raises(ValueError, match="no set 'novels' to import: there are: text, "):
        import_set("novels", tmp_path, tmp_path / "out")
