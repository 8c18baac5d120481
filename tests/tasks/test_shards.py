"""Data sets on disk: the same bytes for any number of workers and after any interruption."""

import json
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from releases import content
from support import run_python

from dlrnn.cli import main
from dlrnn.tasks import data, listops
from dlrnn.tasks.listops import ListOpsGenerator, evaluate, generator, to_text
from dlrnn.tasks.storage import shards
from dlrnn.tasks.storage.build import build_set, locked, set_header
from dlrnn.tasks.storage.specs import scaled_counts

LIMITS = {"max_depth": 4, "max_args": 3, "min_length": 6, "max_length": 40}
COUNTS = {"train": 50, "validation": 10, "test": 5}
WITH_DUPLICATES = ListOpsGenerator(**LIMITS, counts=COUNTS, shard_rows=16, seed=1)
HEADER = set_header("listops-subtrees", LIMITS, 16, COUNTS, seed=1)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return build_set(WITH_DUPLICATES, tmp_path_factory.mktemp("sets") / "whole")


@pytest.fixture
def copy(whole, tmp_path):
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def test_files_and_manifest_of_a_build(whole):
    names = [f"train-{number:05d}.parquet" for number in range(4)]
    names += ["validation-00000.parquet", "test-00000.parquet"]
    assert set(content(whole)) == {*names, "manifest.json"}
    manifest = shards.load_manifest(whole)
    assert [entry["file"] for entry in manifest["shards"]] == names
    assert [entry["rows"] for entry in manifest["shards"]] == [16, 16, 16, 2, 10, 5]
    assert manifest["task"] == "listops-subtrees"
    assert (manifest["parameters"], manifest["counts"]) == (LIMITS, COUNTS)
    assert (manifest["seed"], manifest["format"], manifest["shard_rows"]) == (1, 1, 16)
    assert set(manifest["versions"]) == {"dlrnn", "numba", "numpy", "pyarrow"}
    assert shards.verify(whole) == []
    table = pq.read_table(whole / names[0])  # with anyone's tools
    tokens = np.frombuffer(table["tokens"][0].as_py(), dtype=np.uint8)
    assert evaluate(to_text(tokens)) == table["label"][0].as_py()


def test_templates_are_unique_and_only_later_samples_change(whole):
    seen, redrawn = set(), 0
    for split in COUNTS:
        for index, sample in enumerate(shards.Split(whole, split)):
            attempt = 0
            while True:  # the rule, one sample after the other
                tree = WITH_DUPLICATES.draw(split, index, attempt)
                if tree.template not in seen:
                    break
                attempt, redrawn = tree.attempt + 1, redrawn + 1
            seen.add(tree.template)
            assert sample["template"] == tree.template
            assert sample["attempt"] == tree.attempt
            assert np.array_equal(sample["tokens"], tree.tokens)
    assert len(seen) == 65
    assert redrawn > 5


def test_two_workers_write_the_same(whole, tmp_path):
    seen = []
    two = build_set(
        WITH_DUPLICATES, tmp_path / "two", workers=2, progress=lambda *now: seen.append(now)
    )
    assert content(two) == content(whole)
    assert seen[0] == (0, 65)
    assert seen[-1] == (65, 65)
    assert seen == sorted(seen)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads masks under /proc")
def test_workers_ignore_the_interrupts_of_a_terminal():
    """Also the first worker, with which Python starts its resource tracker."""
    code = """
import signal, time
from multiprocessing import get_context
from pathlib import Path
from dlrnn.tasks.storage.build import start_without_interrupts

def is_blocked(pid):
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    [mask] = [line.split()[1] for line in lines if line.startswith("SigBlk:")]
    return bool(int(mask, 16) >> (signal.SIGINT - 1) & 1)

if __name__ == "__main__":
    for _ in range(2):
        process = get_context("spawn").Process(target=time.sleep, args=(60,))
        start_without_interrupts(process)
        print(is_blocked(process.pid), is_blocked("self"))
        process.kill()
"""
    assert run_python(code).split() == ["True", "False"] * 2


def test_building_again_changes_nothing(copy):
    before = {path: path.stat().st_mtime_ns for path in copy.iterdir()}
    build_set(WITH_DUPLICATES, copy)
    assert {path: path.stat().st_mtime_ns for path in copy.iterdir()} == before


def test_building_again_repairs_damaged_and_missing_shards(copy, whole):
    (copy / "train-00001.parquet").write_bytes(b"not this")
    (copy / "test-00000.parquet").unlink()
    build_set(WITH_DUPLICATES, copy)
    assert content(copy) == content(whole)


# ---------------------------------------------------------------------------------- interruptions

BUILD = """
import sys
from dlrnn.tasks.storage import shards
from dlrnn.tasks.storage.build import build_set
from dlrnn.tasks.listops import lra
if __name__ == "__main__":
    spec = lra(counts={"train": 6000, "test": 100}, shard_rows=400)
    build_set(spec, sys.argv[1], workers=2)
"""


def test_a_build_that_was_killed_is_completed(tmp_path):
    """After SIGKILL of the builder its workers end and write nothing."""
    script, out = tmp_path / "build.py", tmp_path / "out"
    script.write_text(BUILD)
    for shards_before in (1, 5):
        process = subprocess.Popen([sys.executable, str(script), str(out)])
        try:
            while process.poll() is None and len(list(out.glob("*.parquet"))) < shards_before:
                time.sleep(0.005)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        assert not (out / "manifest.json").exists()
        assert shards.verify(out) == [f"{out} was not built to its end; run its build again"]
    spec = listops.lra(counts={"train": 6000, "test": 100}, shard_rows=400)
    build_set(spec, out, workers=1)
    time.sleep(0.5)
    assert content(out) == content(build_set(spec, tmp_path / "whole"))


# ---------------------------------------------------------------------------------- verify


def test_flipped_missing_and_unknown_files_are_named(copy):
    (copy / "train-00001.parquet").rename(copy / "train-00009.parquet")
    (copy / "notes.txt").touch()
    for number, place in ((0, 0), (2, 500), (3, -1)):
        path = copy / f"train-0000{number}.parquet"
        data = bytearray(path.read_bytes())
        data[place] ^= 16
        path.write_bytes(data)
    damaged = "is damaged: its SHA-256 is not the manifest's"
    assert shards.verify(copy) == [
        f"train-00000.parquet {damaged}",
        "train-00001.parquet is missing",
        f"train-00002.parquet {damaged}",
        f"train-00003.parquet {damaged}",
        "notes.txt does not belong to the set",
        "train-00009.parquet does not belong to the set",
    ]


def test_a_changed_manifest_is_found(copy):
    path = copy / "manifest.json"
    path.write_text(path.read_text().replace('"seed": 1', '"seed": 2'))
    (problem,) = shards.verify(copy)
    assert problem.endswith("manifest.json is damaged; its SHA-256 is not that of its content")
    path.write_text("{")
    assert "manifest.json is damaged; it is not JSON" in shards.verify(copy)[0]


def test_a_folder_without_a_data_set(tmp_path):
    assert shards.verify(tmp_path) == [f"{tmp_path} holds no set"]
    (tmp_path / "file").touch()
    for name, keywords in (("file", "file is a file; a folder was"), ("no", "there is no folder")):
        for read in (shards.verify, shards.load_manifest):
            with pytest.raises(ValueError, match=keywords):
                read(tmp_path / name)


# ---------------------------------------------------------------------------------- refusals


def refused(spec, out, keywords, **options):
    out = Path(out)
    before = content(out) if out.is_dir() else out.exists()
    with pytest.raises(ValueError, match=keywords) as caught:
        build_set(spec, out, **options)
    assert "\n" not in str(caught.value)
    assert (content(out) if out.is_dir() else out.exists()) == before


def test_invalid_builds_are_refused(copy, tmp_path, monkeypatch):
    new = tmp_path / "new"
    refused(WITH_DUPLICATES, new, "workers .* not 0", workers=0)
    refused(ListOpsGenerator(counts={"train": 0}), new, "samples .* not 0")
    refused(ListOpsGenerator(counts={"train": -5}), new, "samples of train .* not -5")
    refused(ListOpsGenerator(counts={"dev": 5}), new, "there is no split 'dev'")
    refused(ListOpsGenerator(counts={"train": 10**12}), new, "samples of train .* not 10{12}")
    usage = namedtuple("usage", "total used free")(100, 90, 10)
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda _: usage)
        refused(ListOpsGenerator(), new, "not enough room for listops-subtrees")
    other = ListOpsGenerator(**{**LIMITS, "max_depth": 5}, counts=COUNTS, shard_rows=16, seed=1)
    refused(other, copy, "holds another set .its parameters")
    refused(
        ListOpsGenerator(**LIMITS, counts=COUNTS, shard_rows=16),
        copy,
        "another set .its seed 1, not 0",
    )
    (copy / "manifest.json").unlink()
    refused(WITH_DUPLICATES, copy, "holds shards of an unknown set")
    (copy / "thesis.tex").touch()
    refused(WITH_DUPLICATES, copy, "holds 'thesis.tex', which belongs to no set")
    for file in (copy / "thesis.tex", copy / "thesis.tex" / "set"):
        refused(WITH_DUPLICATES, file, "thesis.tex is a file; a folder was expected")
    monkeypatch.setattr(generator, "MAX_ATTEMPTS", 1000)
    refused(ListOpsGenerator(max_depth=2), new, "no tree of depth 2")


def test_an_unfinished_build_needs_the_versions_that_started_it(copy, monkeypatch):
    manifest = shards.load_manifest(copy)
    header = {key: value for key, value in manifest.items() if key not in ("shards", "sha256")}
    header["versions"]["pyarrow"] = "1.0"
    (copy / "manifest.json").unlink()
    (copy / "progress.jsonl").write_text(json.dumps(header) + "\n")
    refused(WITH_DUPLICATES, copy, "holds another set .its versions")


def test_a_damaged_data_set_of_other_versions_is_refused_before_any_progress(copy):
    manifest = shards.load_manifest(copy)
    manifest["versions"]["pyarrow"] = "1.0"
    manifest["sha256"] = shards.manifest_hash(manifest)
    (copy / "manifest.json").write_text(json.dumps(manifest))
    (copy / "test-00000.parquet").unlink()
    seen = []
    refused(WITH_DUPLICATES, copy, "is damaged and was made by", progress=lambda *n: seen.append(n))
    assert seen == []


def test_too_few_templates_are_refused(tmp_path):
    few = ListOpsGenerator(max_depth=2, max_args=2, min_length=1, max_length=9, counts={"train": 5})
    with pytest.raises(ValueError, match=r"train sample 4 .* no unique template"):
        build_set(few, tmp_path / "few")
    assert shards.verify(tmp_path / "few")  # it is not complete


def test_a_folder_has_one_build_at_a_time(copy):
    with locked(copy):
        refused(WITH_DUPLICATES, copy, "another process is building")


@pytest.mark.parametrize("name", data.GENERATORS)
def test_fewer_samples_keep_the_proportions_of_splits(name):
    counts = dict(data.GENERATORS[name]().counts)
    whole = sum(counts.values())
    assert scaled_counts(counts, whole) == counts
    tenth = {split: count // 10 for split, count in counts.items()}
    assert scaled_counts(counts, whole // 10) == tenth
    for samples in (3, 4, 7, 59):
        scaled = scaled_counts(counts, samples)
        assert min(scaled.values()) >= 1
        assert sum(scaled.values()) == samples
    with pytest.raises(ValueError, match=r"samples must be at least 3.* not 2"):
        scaled_counts(counts, 2)


# ---------------------------------------------------------------------------------- reading


def test_samples_and_batches(whole):
    train = shards.Split(whole, "train")
    assert len(train) == 50
    asked = [49, 0, 17, -1, 0]
    batch = train.batch(asked)
    for index, found in zip(asked, batch, strict=True):
        sample = train[index]
        assert sample.keys() == found.keys()
        assert all(np.array_equal(found[name], sample[name]) for name in sample)
        one = namedtuple("Sample", sample)(**sample)
        assert (one.tokens.dtype, one.values.dtype) == (np.uint8, np.uint8)
        assert (one.heights.dtype, one.positions.dtype) == (np.uint8, np.uint16)
        assert evaluate(to_text(one.tokens)) == one.label == one.values[-1]
        assert len(one.operators) == len(one.positions)
    assert set(shards.Split(whole, "test", columns=["label"])[4]) == {"label"}


THREADS = """
import sys, threading
from dlrnn.tasks.storage import shards
sys.setswitchinterval(1e-5)
shards.CACHE_BYTES = 1
split, wrong = shards.Split(sys.argv[1], "train", columns=["label"]), []
labels = [sample["label"] for sample in split]

def read(offset):
    try:
        for k in range(2000):
            index = (offset + 17 * k) % len(split)
            assert split[index]["label"] == labels[index]
    except Exception as error:
        wrong.append(error)

threads = [threading.Thread(target=read, args=(offset,)) for offset in range(3)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(wrong)
"""


def test_threads_may_share_a_split(whole):
    assert run_python(THREADS, str(whole)).strip() == "[]"


def test_the_cache_of_row_groups_is_bounded(whole, monkeypatch):
    train = shards.Split(whole, "train")
    train.batch(range(50))
    sizes = [table.nbytes for table in train.cache.values()]
    assert len(sizes) == 4
    for bound, kept in ((sizes[2] + sizes[3], 2), (1, 1)):
        monkeypatch.setattr(shards, "CACHE_BYTES", bound)
        train = shards.Split(whole, "train")
        train.batch(range(50))
        assert [table.nbytes for table in train.cache.values()] == sizes[-kept:]


def test_missing_samples_splits_and_columns_are_refused(whole, tmp_path):
    with pytest.raises(IndexError, match="there is no sample 50; there are 50"):
        shards.Split(whole, "train")[50]
    with pytest.raises(ValueError, match="has no split 'dev'; there are test, train, validation"):
        shards.Split(whole, "dev")
    with pytest.raises(ValueError, match="has no column 'image'; it has attempt, "):
        shards.Split(whole, "train", columns=["image"])
    with pytest.raises(ValueError, match="holds no set"):
        shards.Split(tmp_path, "train")


# ---------------------------------------------------------------------------------- by name


def test_data_sets_are_built_and_listed_by_name(tmp_path):
    out = data.build("listops", samples=60, seed=7, workers=1, out=tmp_path / "sets" / "a")
    assert shards.verify(out) == []
    assert shards.load_manifest(out)["counts"] == {"train": 58, "validation": 1, "test": 1}
    unfinished = tmp_path / "sets" / "b"
    unfinished.mkdir()
    (unfinished / "progress.jsonl").write_text(json.dumps(HEADER) + "\n")
    (unfinished / "other.json").write_text("[]")
    edited = json.loads((out / "manifest.json").read_text()) | {"seed": 8}
    for name, manifest in (("c", edited), ("d", {"task": "x", "counts": [1], "seed": 0})):
        (tmp_path / "sets" / name).mkdir()
        (tmp_path / "sets" / name / "manifest.json").write_text(json.dumps(manifest))
    rows = data.list_sets(tmp_path / "sets")
    assert [(row["samples"], row["seed"], row["state"]) for row in rows] == [
        (60, 7, "built"),
        (65, 1, "not finished"),
        (60, 8, "damaged"),
    ]
    lra = data.build("pathfinder", samples=30, workers=1, out=tmp_path / "lra")
    assert shards.load_manifest(lra)["counts"] == {"train": 24, "validation": 3, "test": 3}


@pytest.mark.parametrize(
    ("name", "options", "keywords"),
    [
        ("listop", {}, "there is no set 'listop' to build: did you mean 'listops'"),
        ("listops", {"resolution": 64}, "listops has no resolution"),
        ("path-x", {"resolution": 64}, "path-x has one resolution"),
        ("listops", {"samples": 2}, "samples must be at least 3"),
        ("pathfinder-segmentation", {"resolution": 31}, "resolution must be from 32 to 1024"),
        ("listops", {"out": "file/sub", "samples": 3}, "file is a file; a folder was expected"),
    ],
)
def test_invalid_commands_print_one_line_and_no_progress(
    name, options, keywords, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FORCE_COLOR", "1")  # as in a terminal
    Path("file").touch()
    given = [part for key, value in options.items() for part in (f"--{key}", str(value))]
    assert main(["data", "build", name, *given]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("dlrnn data: ")
    assert printed.err.count("\n") == 1
    assert keywords in printed.err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_progress_is_shown_in_a_terminal(tmp_path, capsys, monkeypatch):
    build = ["data", "build", "listops", "--samples", "3", "--workers", "1", "--out"]
    out = str(tmp_path / "set")
    assert main([*build, out]) == 0
    assert capsys.readouterr() == (f"the set is in {out}\n", "")
    monkeypatch.setenv("FORCE_COLOR", "1")  # as in a terminal
    assert main([*build, str(tmp_path / "other")]) == 0
    assert main(["data", "verify", out]) == 0
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == 2
    assert "listops" in printed.err
    assert "verify" in printed.err
