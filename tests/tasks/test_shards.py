"""A set on disk: the same bytes for any number of workers and after any interruption."""

import json
import pickle
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
from support import run_python

from dlrnn.tasks import build, data_cli, listops, shards
from dlrnn.tasks.build import build_set
from dlrnn.tasks.listops import ListOps, evaluate, to_text

LIMITS = {"max_depth": 4, "max_args": 3, "min_length": 6, "max_length": 40}
COUNTS = {"train": 50, "validation": 10, "test": 5}
WITH_DUPLICATES = ListOps(**LIMITS, counts=COUNTS, shard_rows=16, seed=1)
SPEC = f"ListOps(**{LIMITS}, counts={COUNTS}, shard_rows=16, seed=1)"


def content(folder):
    return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return build_set(WITH_DUPLICATES, tmp_path_factory.mktemp("sets") / "whole")


@pytest.fixture
def copy(whole, tmp_path):
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def test_what_is_written(whole):
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
        for index, sample in enumerate(shards.read(whole, split)):
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
def test_workers_do_not_hear_a_terminal():
    """The first of a process, too, with which Python starts a helper of its own."""
    code = """
import signal, time
from multiprocessing import get_context
from pathlib import Path
from dlrnn.tasks.build import _start

def is_blocked(pid):
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    [mask] = [line.split()[1] for line in lines if line.startswith("SigBlk:")]
    return bool(int(mask, 16) >> (signal.SIGINT - 1) & 1)

if __name__ == "__main__":
    for _ in range(2):
        process = get_context("spawn").Process(target=time.sleep, args=(60,))
        _start(process)
        print(is_blocked(process.pid), is_blocked("self"))
        process.kill()
"""
    assert run_python(code).split() == ["True", "False"] * 2


def test_building_again_changes_nothing(copy):
    before = {path: path.stat().st_mtime_ns for path in copy.iterdir()}
    build_set(WITH_DUPLICATES, copy)
    assert {path: path.stat().st_mtime_ns for path in copy.iterdir()} == before


def test_building_again_mends(copy, whole):
    (copy / "train-00001.parquet").write_bytes(b"not this")
    (copy / "test-00000.parquet").unlink()
    build_set(WITH_DUPLICATES, copy)
    assert content(copy) == content(whole)


# ---------------------------------------------------------------------------------- interruptions

BUILD = """
import sys
from dlrnn.tasks import shards
from dlrnn.tasks.build import build_set
from dlrnn.tasks.listops import lra
if __name__ == "__main__":
    spec = lra(counts={"train": 6000, "test": 100}, shard_rows=400)
    build_set(spec, sys.argv[1], workers=2)
"""


def test_killed_with_its_workers_at_work(tmp_path):
    """kill -9 of the builder: its workers end by themselves and write nothing any more."""
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


# ---------------------------------------------------------------------------------- checking


@pytest.mark.parametrize("place", [0, 500, -1])
def test_a_flipped_byte_is_found_and_named(copy, place):
    path = copy / "train-00002.parquet"
    data = bytearray(path.read_bytes())
    data[place] ^= 16
    path.write_bytes(data)
    (problem,) = shards.verify(copy)
    assert problem == "train-00002.parquet is damaged: its SHA-256 is not the manifest's"


def test_missing_and_unknown_files_are_named(copy):
    (copy / "train-00001.parquet").rename(copy / "train-00009.parquet")
    (copy / "notes.txt").touch()
    assert shards.verify(copy) == [
        "train-00001.parquet is missing",
        "notes.txt does not belong to the set",
        "train-00009.parquet does not belong to the set",
    ]


def test_a_changed_manifest_is_found(copy):
    path = copy / "manifest.json"
    path.write_text(path.read_text().replace('"seed": 1', '"seed": 2'))
    (problem,) = shards.verify(copy)
    assert problem.endswith("manifest.json is damaged; its SHA-256 is not that of its content")
    path.write_text("{")
    assert shards.verify(copy)[0].endswith("manifest.json is damaged; it is not JSON")


def test_wrong_counts_are_found(copy):
    manifest = shards.load_manifest(copy)
    manifest["counts"]["test"] = 6
    manifest["shards"][5]["rows"] = 4
    manifest["sha256"] = shards.own_hash(manifest)
    (copy / "manifest.json").write_text(json.dumps(manifest))
    assert shards.verify(copy) == [
        "test-00000.parquet holds 5 samples, not 4",
        "the shards of test hold 4 samples, not 6",
    ]


def test_no_set(tmp_path):
    assert shards.verify(tmp_path) == [f"{tmp_path} holds no set"]
    (tmp_path / "file").touch()
    for name, sentence in (("file", "file is a file; a folder was"), ("no", "there is no folder")):
        for look in (shards.verify, shards.load_manifest):
            with pytest.raises(ValueError, match=sentence):
                look(tmp_path / name)


# ---------------------------------------------------------------------------------- refusing


def refused(spec, out, sentence, **options):
    out = Path(out)
    before = content(out) if out.is_dir() else out.exists()
    with pytest.raises(ValueError, match=sentence) as caught:
        build_set(spec, out, **options)
    assert "\n" not in str(caught.value)
    assert (content(out) if out.is_dir() else out.exists()) == before


def test_wrong_requests(copy, tmp_path, monkeypatch):
    new = tmp_path / "new"
    refused(WITH_DUPLICATES, new, "workers must be at least 1, not 0", workers=0)
    refused(ListOps(counts={"train": 0}), new, "samples must be at least 1, not 0")
    refused(ListOps(counts={"train": -5}), new, "samples of train must be at least 0, not -5")
    refused(ListOps(counts={"dev": 5}), new, "there is no split 'dev'")
    refused(ListOps(counts={"train": 10**12}), new, "there is not enough room for listops-subtrees")
    other = ListOps(**{**LIMITS, "max_depth": 5}, counts=COUNTS, shard_rows=16, seed=1)
    refused(other, copy, "holds another set .its parameters")
    refused(ListOps(**LIMITS, counts=COUNTS, shard_rows=16), copy, "another set .its seed 1, not 0")
    (copy / "manifest.json").unlink()
    refused(WITH_DUPLICATES, copy, "holds shards of an unknown set")
    (copy / "thesis.tex").touch()
    refused(WITH_DUPLICATES, copy, "holds 'thesis.tex', which belongs to no set")
    for file in (copy / "thesis.tex", copy / "thesis.tex" / "set"):
        refused(WITH_DUPLICATES, file, "thesis.tex is a file; a folder was expected")
    monkeypatch.setattr(listops, "_ATTEMPTS", 1000)
    refused(ListOps(max_depth=2), new, "no tree of depth 2 and at most 9 children")


def test_a_begun_set_goes_on_with_the_versions_it_was_begun_with(copy, monkeypatch):
    manifest = shards.load_manifest(copy)
    header = {key: value for key, value in manifest.items() if key not in ("shards", "sha256")}
    header["versions"]["pyarrow"] = "1.0"
    (copy / "manifest.json").unlink()
    (copy / "progress.jsonl").write_text(json.dumps(header) + "\n")
    refused(WITH_DUPLICATES, copy, "holds another set .its versions")


def test_a_damaged_set_of_other_versions_is_refused_before_any_progress(copy):
    manifest = shards.load_manifest(copy)
    manifest["versions"]["pyarrow"] = "1.0"
    manifest["sha256"] = shards.own_hash(manifest)
    (copy / "manifest.json").write_text(json.dumps(manifest))
    (copy / "test-00000.parquet").unlink()
    seen = []
    refused(WITH_DUPLICATES, copy, "is damaged and was made by", progress=lambda *n: seen.append(n))
    assert seen == []


def test_too_few_templates(tmp_path):
    few = ListOps(max_depth=2, max_args=2, min_length=1, max_length=9, counts={"train": 5})
    with pytest.raises(ValueError, match="train sample 4 found no template of its own in 1000"):
        build_set(few, tmp_path / "few")
    assert shards.verify(tmp_path / "few")  # it does not look whole


def test_one_build_a_folder(copy):
    with build._locked(copy):
        refused(WITH_DUPLICATES, copy, "another process is building .*; wait for it to end")


@pytest.mark.parametrize("name", data_cli.SETS)
def test_fewer_samples_keep_the_proportions(name):
    counts = dict(data_cli.SETS[name]().counts)
    whole = sum(counts.values())
    assert shards.scaled_counts(counts, whole) == counts
    tenth = {split: count // 10 for split, count in counts.items()}
    assert shards.scaled_counts(counts, whole // 10) == tenth
    for samples in (3, 4, 7, 59):
        scaled = shards.scaled_counts(counts, samples)
        assert min(scaled.values()) >= 1
        assert sum(scaled.values()) == samples
    sentence = "samples must be at least 3, one for each of test, train, validation, not 2"
    with pytest.raises(ValueError, match=sentence):
        shards.scaled_counts(counts, 2)


# ---------------------------------------------------------------------------------- reading


def test_reading(whole):
    train = shards.read(whole, "train")
    assert len(train) == 50
    asked = [49, 0, 17, -1, 0]
    batch = train.batch(asked)
    for place, index in enumerate(asked):
        sample = train[index]
        for name, values in batch.items():
            assert np.array_equal(values[place], sample[name])
        one = namedtuple("Sample", sample)(**sample)
        assert (one.tokens.dtype, one.values.dtype) == (np.uint8, np.uint8)
        assert (one.heights.dtype, one.positions.dtype) == (np.uint8, np.uint16)
        assert evaluate(to_text(one.tokens)) == one.label == one.values[-1]
        assert len(one.operators) == len(one.positions)
    assert set(shards.read(whole, "test", columns=["label"])[4]) == {"label"}
    assert pickle.loads(pickle.dumps(train))[3]["label"] == train[3]["label"]


THREADS = """
import sys, threading
from dlrnn.tasks import shards
sys.setswitchinterval(1e-5)
shards.KEPT = 1
split, wrong = shards.read(sys.argv[1], "train", columns=["label"]), []
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


def test_threads_share_a_split(whole):
    assert run_python(THREADS, str(whole)).strip() == "[]"


def test_what_is_kept_is_bounded_by_its_bytes(whole, monkeypatch):
    train = shards.read(whole, "train")
    train.batch(range(50))
    sizes = [table.nbytes for table in train._kept.values()]
    assert len(sizes) == 4
    assert train._kept_bytes == sum(sizes)
    for bound, kept in ((sizes[2] + sizes[3], 2), (1, 1)):
        monkeypatch.setattr(shards, "KEPT", bound)
        train = shards.read(whole, "train")
        train.batch(range(50))
        assert [table.nbytes for table in train._kept.values()] == sizes[-kept:]
        assert train._kept_bytes == sum(sizes[-kept:])


def test_few_files_are_open_at_once(whole, monkeypatch):
    every = shards.read(whole, "train")
    wanted = every.batch(range(50))
    assert len(every._files) > 2
    monkeypatch.setattr(shards, "OPEN", 2)
    monkeypatch.setattr(shards, "KEPT", 1)
    few = shards.read(whole, "train")
    for indices in (range(50), range(49, -1, -1)):
        found = few.batch(indices)
        assert len(few._files) == 2
        for name, values in found.items():
            for place, index in enumerate(indices):
                assert np.array_equal(values[place], wanted[name][index])


def test_a_damaged_shard_is_named(whole, tmp_path):
    copy = shutil.copytree(whole, tmp_path / "set")
    last = sorted(copy.glob("train-*.parquet"))[-1]
    last.write_bytes(last.read_bytes()[:100])
    train = shards.read(copy, "train")
    assert train[0]
    with pytest.raises(ValueError, match=rf"{last.name} is damaged .*: `dlrnn data verify {copy}`"):
        train[49]


def test_reading_what_is_not_there(whole, tmp_path):
    with pytest.raises(IndexError, match="there is no sample 50; there are 50"):
        shards.read(whole, "train")[50]
    with pytest.raises(ValueError, match="has no split 'dev'; there are test, train, validation"):
        shards.read(whole, "dev")
    with pytest.raises(ValueError, match="has no column 'image'; it has attempt, "):
        shards.read(whole, "train", columns=["image"])
    with pytest.raises(ValueError, match="holds no set"):
        shards.read(tmp_path, "train")


# ---------------------------------------------------------------------------------- the command


def test_what_the_command_does(tmp_path):
    out = data_cli.build("listops", samples=60, seed=7, workers=1, out=tmp_path / "sets" / "a")
    assert data_cli.verify(out) == []
    assert shards.load_manifest(out)["counts"] == {"train": 58, "validation": 1, "test": 1}
    begun = tmp_path / "sets" / "b"
    begun.mkdir()
    (begun / "progress.jsonl").write_text(json.dumps(build._header(WITH_DUPLICATES)) + "\n")
    (begun / "other.json").write_text("[]")
    rows = data_cli.found(tmp_path / "sets")
    assert [(row["samples"], row["seed"], row["state"]) for row in rows] == [
        (60, 7, "built"),
        (65, 1, "not finished"),
    ]
    lra = data_cli.build("pathfinder", samples=30, workers=1, out=tmp_path / "lra")
    assert shards.load_manifest(lra)["counts"] == {"train": 24, "validation": 3, "test": 3}


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("listop", {}, "there is no set 'listop' to build: did you mean 'listops'?"),
        ("listops", {"resolution": 64}, "listops has no resolution; only pathfinder-seg"),
        ("path-x", {"resolution": 64}, "path-x has one resolution; only pathfinder-segmentation"),
        ("listops", {"samples": 2}, "samples must be at least 3, one for each of"),
        ("pathfinder-segmentation", {"resolution": 31}, "resolution must be from 32 to 4096"),
        ("listops", {"out": "file/sub", "samples": 3}, "file is a file; a folder was expected"),
    ],
)
def test_what_the_command_refuses(name, options, sentence, tmp_path, monkeypatch, capsys):
    """With one sentence and no progress bar."""
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    with pytest.raises(ValueError, match=sentence.replace("?", ".")):
        data_cli.build(name, **options)
    assert capsys.readouterr() == ("", "")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_the_bar_goes_to_stderr(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    out = data_cli.build("listops", samples=3, workers=1, out=tmp_path / "set")
    data_cli.verify(out)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "listops" in printed.err
    assert "verify" in printed.err
    with pytest.raises(ValueError, match="there is no folder"):
        data_cli.verify(tmp_path / "no")
    assert capsys.readouterr() == ("", "")


def test_what_is_not_a_terminal_gets_lines(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(data_cli, "SECONDS_A_LINE", -1)
    data_cli.build("listops", samples=30, workers=1, out=tmp_path / "set")
    assert capsys.readouterr().err.splitlines()[-1] == "listops: 30 of 30 samples"
