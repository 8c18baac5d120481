"""Forged data sets on disk are refused with an error that names the file, or are read."""

import json
import os
import shutil
from hashlib import sha256
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hostile import bounded_memory, deadline, run_command
from support import tiny_books

from dlrnn import tasks
from dlrnn.tasks import listops
from dlrnn.tasks.data import list_sets
from dlrnn.tasks.storage import columns, shards
from dlrnn.tasks.storage.build import build_set

pytestmark = pytest.mark.usefixtures("unchecked")

TRAIN, MANIFEST = "train-00000.parquet", "manifest.json"
COUNTS = {"train": 8, "validation": 2, "test": 2}
TREES = {
    "listops": listops.lra(counts=COUNTS, shard_rows=5),
    "listops-subtrees": listops.subtrees(counts=COUNTS, min_length=54, max_length=63),
}
SETTINGS = {"listops-subtrees": {"length": 64}}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    base = tmp_path_factory.mktemp("made")
    for name, spec in TREES.items():
        build_set(spec, base / name)
    tiny_books(base)
    return base


@pytest.fixture
def trees(made, tmp_path):
    return Path(shutil.copytree(made / "listops", tmp_path / "trees"))


@pytest.fixture
def copied(made, tmp_path):
    return lambda name: Path(shutil.copytree(made / name, tmp_path / name))


def forge(folder, change):
    """Change the manifest and update its hash, as an attacker would."""
    path = folder / MANIFEST
    manifest = json.loads(path.read_text())
    change(manifest)
    manifest["sha256"] = shards.manifest_hash(manifest)
    path.write_text(json.dumps(manifest))


def reshard(folder, content, file=TRAIN):
    """Replace a shard by bytes or by a table with as many rows, and update its hash."""
    path = folder / file
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        pq.write_table(content, path, compression="zstd", row_group_size=20)
    digest = sha256(path.read_bytes()).hexdigest()

    def change(manifest):
        [entry] = [each for each in manifest["shards"] if each["file"] == file]
        entry["sha256"] = digest

    forge(folder, change)


def sampled(folder, name="listops"):
    """Read batches as training does."""
    task = tasks.get(name, folder=str(folder), **SETTINGS.get(name, {}))
    with bounded_memory(), deadline(10):
        return [task.sample(2, step=step) for step in range(4)]


def refused(folder, file, keywords=".", name="listops", *, verify=True):
    """Training and `data verify` raise an error of one line that names the file."""
    with pytest.raises(ValueError, match=keywords) as caught:
        sampled(folder, name)
    assert str(folder / file) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000
    if verify:
        with bounded_memory(), deadline(10):
            problems = shards.verify(folder)
        assert any(file in each for each in problems), problems


def test_valid_sets_are_read(made):
    """Without this test, the refusals below could have another cause."""
    for name in TREES:
        assert shards.verify(made / name) == []
        sampled(made / name, name)
    assert shards.verify(made / "set") == []
    tasks.get("pg19", folder=str(made / "set"), length=16).sample(2)


# ---------------------------------------------------------------------------------- manifests


def put(name, value):
    def change(manifest):
        *parents, last = name.split(".")
        for each in parents:
            manifest = manifest[int(each) if each.isdecimal() else each]
        manifest[int(last) if last.isdecimal() else last] = value

    return change


KEYS = ("format", "task", "parameters", "counts", "shards", "shard_rows", "seed", "versions")
WRONG = [
    *((name, value) for name in KEYS[1:] for value in (None, "text", ["a"], -1.5, {"a": None})),
    *((("shards", [None])), ("shards", [{"file": TRAIN}]), ("shards", [[TRAIN]]), ("unknown", 1)),
    *(("shards.0", {"rows": 5, "sha256": "x"}), ("shards.0.file", 3), ("shards.0.file", None)),
    *(("shards.0.file", f"train-x/../../trees/{TRAIN}"), ("shards.0.file", f"./{TRAIN}")),
    *(("shards.0.file", f"/tmp/{TRAIN}"), ("shards.0.file", "train-0000\u0660.parquet")),
    *(("shards.0.rows", 0), ("shards.0.rows", -1), ("shards.0.rows", 2**63)),
    *(("shard_rows", 0), ("shard_rows", -1), ("shard_rows", 10**12), ("shard_rows", True)),
    *(("counts.train", 10**11), ("counts.train", -1), ("counts.train", 1.0), ("counts.other", 1)),
    *(("parameters.max_length", None), ("parameters.max_length", -5), ("seed", 2**64)),
    *(("remark", "\x1b[31mred"), ("remark", 5), ("format", 2), ("format", [[[]]])),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), WRONG, ids=lambda value: str(value)[:30])
def test_a_manifest_with_invalid_values_is_refused(name, value, trees):
    forge(trees, put(name, value))
    refused(trees, MANIFEST)


@pytest.mark.parametrize("name", [*KEYS, "sha256"])
def test_a_manifest_without_a_key_is_refused(name, trees):
    forge(trees, lambda manifest: manifest.pop(name, None))
    if name == "sha256":
        manifest = json.loads((trees / MANIFEST).read_text())
        del manifest["sha256"]
        (trees / MANIFEST).write_text(json.dumps(manifest))
    refused(trees, MANIFEST)


def test_counts_that_contradict_the_shards_are_refused(trees):
    def fewer(manifest):
        manifest["counts"]["train"] = 2**24
        manifest["shard_rows"] = 2**20

    forge(trees, fewer)
    refused(trees, MANIFEST, verify=False)
    assert "the shards of train hold 8 samples, not 16777216" in shards.verify(trees)
    forge(trees, put("shards.0.rows", 10**12))
    refused(trees, MANIFEST, verify=False)
    forge(trees, put("shards", []))
    refused(trees, MANIFEST, verify=False)


def test_shards_out_of_order_are_refused(trees):
    forge(trees, lambda manifest: manifest["shards"].reverse())
    refused(trees, MANIFEST, "not numbered from 0", verify=False)
    forge(trees, lambda manifest: manifest["shards"].extend(manifest["shards"][:1]))
    refused(trees, MANIFEST, verify=False)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b"[" * 200_000, b'{"a":' * 200_000, b'{"seed": ' + b"9" * 5000,
     b"\xff\xfe", b'{"a": NaN}', b'{"a": 1, "a": 2}'],
    ids=lambda value: repr(value[:12]),
)  # fmt: skip
def test_a_manifest_that_is_not_json_is_refused(content, trees):
    (trees / MANIFEST).write_bytes(content)
    refused(trees, MANIFEST)


@pytest.mark.parametrize("name", ["length", "vocabulary", "tokenizer"])
@pytest.mark.parametrize("value", [None, [1], 0, "gone"])
def test_parameters_that_a_language_model_needs_are_checked(name, value, copied):
    folder = copied("set")
    forge(folder, lambda manifest: manifest["parameters"].pop(name))
    with pytest.raises(ValueError, match=MANIFEST):
        tasks.get("pg19", folder=str(folder), length=16).sample(2)
    if (name, value) == ("tokenizer", "gone"):
        return
    forge(folder, put(f"parameters.{name}", value))
    with pytest.raises(ValueError, match=MANIFEST):
        tasks.get("pg19", folder=str(folder), length=16).sample(2)


# ---------------------------------------------------------------------------------- files


def replaced(path, kind):
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path)
    else:
        path.symlink_to("/dev/zero" if kind == "device" else "/nowhere")
    return path


@pytest.mark.parametrize("file", [MANIFEST, TRAIN])
@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "loop", "dangling"])
def test_special_files_are_refused(file, kind, trees):
    replaced(trees / file, kind)
    with pytest.raises((ValueError, OSError)) as caught, deadline(5):
        sampled(trees)
    assert str(trees) in str(caught.value)
    if file == TRAIN:
        assert file in str(caught.value)
        assert any(each.startswith(file) for each in shards.verify(trees))


def test_links_to_regular_files_are_followed(made, tmp_path):
    """Shards of a large data set may be on another disk."""
    (tmp_path / "linked").mkdir()
    for path in (made / "listops").iterdir():
        (tmp_path / "linked" / path.name).symlink_to(path)
    (tmp_path / "whole").symlink_to(tmp_path / "linked", target_is_directory=True)
    assert shards.verify(tmp_path / "whole") == []
    sampled(tmp_path / "whole")
    [row] = list_sets(made / "listops")
    assert row["state"] == "built"


@pytest.mark.parametrize("name", [MANIFEST, "progress.jsonl"])
@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "deep", "list", "counts"])
def test_a_listing_skips_invalid_data_sets(name, kind, made, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(made / "listops", tmp_path / "data" / "trees")
    other = tmp_path / "data" / "other"
    other.mkdir()
    (other / name).touch()
    if kind in ("pipe", "device", "folder"):
        replaced(other / name, kind)
    else:
        header = {"task": "\x1b[31m", "counts": {"a": [1]}, "seed": 1}
        texts = {"deep": "[" * 200_000, "list": "[1]", "counts": json.dumps(header)}
        (other / name).write_text(texts[kind])
    done = run_command(["data", "list", "--json"], seconds=5)
    assert done.status == 0, done
    assert not done.faults()
    assert [row["task"] for row in json.loads(done.out)] == ["listops"]


# ---------------------------------------------------------------------------------- shards


def table_of(folder, file=TRAIN, **changed):
    """The table of a shard with other columns."""
    table = pq.read_table(folder / file)
    for name, values in changed.items():
        place = table.schema.get_field_index(name)
        if values is None:
            table = table.remove_column(place)
        else:
            made = values(table[name].to_pylist())
            table = table.set_column(place, name, made)
    return table


def lists(kind):
    return pa.list_(pa.field("element", kind, False))


BAD = {
    "null tokens": {"tokens": lambda v: pa.array([None, *v[1:]], pa.binary())},
    "tokens as text": {"tokens": lambda v: pa.array(["[MAX 1 2 ]"] * len(v))},
    "tokens as numbers": {"tokens": lambda v: pa.array([3] * len(v), pa.int64())},
    "tokens as lists": {"tokens": lambda v: pa.array([[3.5]] * len(v))},
    "unknown tokens": {"tokens": lambda v: pa.array([b"\xff" * 600] * len(v))},
    "long tokens": {"tokens": lambda v: pa.array([b"\1" * 2001] * len(v))},
    "empty tokens": {"tokens": lambda v: pa.array([b""] * len(v))},
    "null label": {"label": lambda v: pa.array([None, *v[1:]], pa.uint8())},
    "label of 10": {"label": lambda v: pa.array([10] * len(v), pa.uint8())},
    "negative label": {"label": lambda v: pa.array([-1] * len(v), pa.int8())},
    "label as text": {"label": lambda v: pa.array(["1"] * len(v))},
    "label as a struct": {"label": lambda v: pa.array([{"a": 1}] * len(v))},
    "dictionary of tokens": {"tokens": lambda v: pa.array(v, pa.binary()).dictionary_encode()},
    "a column less": {"tokens": None},
}


@pytest.mark.parametrize("what", BAD)
def test_invalid_samples_are_refused(what, trees):
    table = table_of(trees, **BAD[what])
    reshard(trees, table)
    if what == "a column less":
        with pytest.raises(ValueError, match="has no column 'tokens'"):
            sampled(trees)
        return
    refused(trees, TRAIN)


@pytest.mark.parametrize(
    "changed",
    [
        {"values": lambda v: pa.array([[200] * len(each) for each in v], lists(pa.uint8()))},
        {"values": lambda v: pa.array([each[1:] for each in v], lists(pa.uint8()))},
        {"values": lambda v: pa.array([[None] * len(each) for each in v], pa.list_(pa.uint8()))},
        {"values": lambda v: pa.array([[float(n) for n in each] for each in v])},
        {"values": lambda v: pa.array([None, *v[1:]], pa.list_(pa.uint8()))},
        {"positions": lambda v: pa.array([[6000] * len(each) for each in v], lists(pa.uint16()))},
        {"positions": lambda v: pa.array([[[1]] * len(each) for each in v])},
    ],
)
def test_invalid_values_and_positions_are_refused(changed, copied):
    folder = copied("listops-subtrees")
    reshard(folder, table_of(folder, **changed))
    refused(folder, TRAIN, name="listops-subtrees")


@pytest.mark.parametrize("tokens", [[3] * 16, [60_000] * 33, [None] * 33])
def test_invalid_tokens_of_a_language_model_are_refused(tokens, copied):
    folder = copied("set")
    rows = pq.read_metadata(folder / TRAIN).num_rows
    reshard(folder, pa.table({"tokens": pa.array([tokens] * rows, pa.list_(pa.uint16()))}))
    with pytest.raises(ValueError, match=TRAIN):
        tasks.get("pg19", folder=str(folder), length=16).sample(2)
    assert any(each.startswith(TRAIN) for each in shards.verify(folder))


@pytest.mark.parametrize("rows", [0, 4, 6])
def test_a_shard_of_another_size_is_refused(rows, trees):
    table = table_of(trees)
    reshard(trees, pa.concat_tables([table, table])[:rows])
    refused(trees, TRAIN, f"holds {rows} samples, not 5")


def test_row_groups_of_another_size_are_refused(trees):
    path = trees / TRAIN
    pq.write_table(table_of(trees), path, row_group_size=2)
    content = path.read_bytes()
    reshard(trees, content)
    refused(trees, "train-00001.parquet", "its row groups are not of 2 samples")
    table = pq.read_table(pa.BufferReader(content))
    with pq.ParquetWriter(path, table.schema) as writer:
        for size in (1, 4):
            writer.write_table(table[:size])
    reshard(trees, path.read_bytes())
    refused(trees, TRAIN, "its row groups are not of 1 samples")


@pytest.mark.parametrize(
    "content",
    [b"", b"PAR1", b"PAR1" * 100, b"nonsense" * 100, b"\0" * 99 + b"\xff\xff\xff\x7fPAR1"],
)
def test_shards_that_are_not_parquet_are_refused(content, trees):
    reshard(trees, content)
    refused(trees, TRAIN)
    done = run_command(["data", "verify", trees])
    assert (done.status, done.faults()) == (1, [])


def error_of(folder):
    """The error message of reading batches, if any."""
    try:
        sampled(folder)
    except ValueError as error:
        return [str(error)]
    return []


def test_flipped_bits_in_a_shard_with_a_valid_hash_do_not_crash(trees):
    """Reading gives samples, or an error that names the file."""
    whole = (trees / TRAIN).read_bytes()
    random = np.random.default_rng(0)
    places = [*random.integers(0, len(whole), 40), *range(len(whole) - 300, len(whole), 6)]
    for place in places:
        broken = bytearray(whole)
        broken[place] ^= 1 << int(random.integers(8))
        reshard(trees, bytes(broken))
        assert all(TRAIN in each for each in error_of(trees))
        for problem in shards.verify(trees):
            assert TRAIN in problem


# ---------------------------------------------------------------------------------- bombs


def bomb(folder, table, **how):
    pq.write_table(table, folder / TRAIN, compression="zstd", store_schema=False, **how)
    content = (folder / TRAIN).read_bytes()
    assert len(content) < 500_000
    rows = table.num_rows
    reshard(folder, content)

    def change(manifest):
        manifest["shards"] = [{**manifest["shards"][0], "rows": rows}, *manifest["shards"][2:]]
        manifest["counts"]["train"] = manifest["shard_rows"] = rows

    forge(folder, change)


def repeated(size, rows):
    text = pa.DictionaryArray.from_arrays(
        pa.array([0] * rows, pa.int32()), pa.array([b"\1" * size])
    )
    return pa.table({"tokens": text, "label": pa.array([0] * rows, pa.uint8())})


@pytest.mark.parametrize(("size", "rows"), [(2**16, 2**16), (2000, 2**16)])
def test_dictionary_bombs_are_refused(size, rows, trees, monkeypatch):
    """A file of a few KB decodes to 4 GiB, or to 128 MB of texts of a valid length."""
    monkeypatch.setattr(columns, "MAX_BYTES", 2**25)
    bomb(trees, repeated(size, rows), row_group_size=rows)
    refused(trees, TRAIN)


def test_an_ordinary_dictionary_is_read(trees):
    table = table_of(trees)
    pq.write_table(table, trees / TRAIN, use_dictionary=True)
    reshard(trees, (trees / TRAIN).read_bytes())
    sampled(trees)
    assert shards.verify(trees) == []


def test_long_lists_are_refused_before_decoding(copied, monkeypatch):
    """Equal values need hardly any space."""
    monkeypatch.setattr(columns, "MAX_VALUES", 2**20)
    folder = copied("listops-subtrees")
    ends = pa.array([0] * 8 + [2**20 + 8], pa.int32())
    values = pa.ListArray.from_arrays(ends, pa.array(np.zeros(2**20 + 8, np.uint8)))
    table = table_of(folder).drop_columns(["values"]).append_column("values", values)
    pq.write_table(table, folder / TRAIN, compression="zstd", row_group_size=20)
    reshard(folder, (folder / TRAIN).read_bytes())
    refused(folder, TRAIN, "more than a data set may have", name="listops-subtrees")


def varint(value):
    coded = b""
    while value > 127:
        coded, value = coded + bytes([value & 127 | 128]), value >> 7
    return coded + bytes([value])


def number(value):
    return varint(value << 1)


def test_sizes_in_page_headers(tmp_path):
    """Those of files that Arrow wrote, and of forged headers."""
    table = pa.table({"a": pa.array([[1, 2]] * 100), "b": pa.array([b"x" * k for k in range(100)])})
    path = tmp_path / "file"
    for how in (
        {},
        {"use_dictionary": False},
        {"data_page_version": "2.0"},
        {"data_page_size": 64},
    ):
        pq.write_table(table, path, **how)
        metadata, content = pq.read_metadata(path), path.read_bytes()
        for place in range(2):
            chunk = metadata.row_group(0).column(place)
            start = chunk.dictionary_page_offset or chunk.data_page_offset
            found = columns.page_sizes(content, start, start + chunk.total_compressed_size)
            assert found.values >= chunk.num_values
            assert 0 < found.raw <= chunk.total_uncompressed_size
    page = b"\x15" + number(0) + b"\x15" + number(2**30) + b"\x15" + number(3)
    page += b"\x2c" + b"\x15" + number(2**31 - 1) + b"\x00" + b"\x00"
    found = columns.page_sizes(b"PAR1" + page + b"abc", 4, 4 + len(page) + 3)
    assert found == (2**30, 2**31 - 1)
    for broken in (page[:-4], b"\xff" * 40, b"\x1c" * 40, b"", b"\x15\x00" * 3 + b"\x00"):
        with pytest.raises(pa.ArrowInvalid):
            columns.page_sizes(b"PAR1" + broken, 4, 5 + len(broken))


# ---------------------------------------------------------------------------------- building


def stopped(folder):
    """Turn a data set into a build that was stopped before its manifest."""
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).unlink()
    header = {key: value for key, value in manifest.items() if key not in ("shards", "sha256")}
    return header, manifest["shards"]


@pytest.mark.parametrize("entry", [{}, {"file": 3, "sha256": "x"}, {"file": TRAIN}, {"rows": []}])
def test_a_forged_progress_file_is_refused(entry, trees):
    header, _ = stopped(trees)
    lines = (json.dumps(each) + "\n" for each in (header, entry))
    (trees / "progress.jsonl").write_text("".join(lines))
    with pytest.raises(ValueError, match=r"progress\.jsonl"):
        build_set(TREES["listops"], trees)


@pytest.mark.parametrize("content", ["[]\n", "3\n", "[" * 200_000 + "\n", '{"task": [[[]]]}\n'])
def test_a_damaged_progress_file_is_refused(content, trees):
    stopped(trees)
    (trees / "progress.jsonl").write_text(content)
    with pytest.raises(ValueError, match="holds"):
        build_set(TREES["listops"], trees)


@pytest.mark.parametrize(
    "changed",
    [
        {"template": lambda v: pa.array([None, *v[1:]], pa.binary(16))},
        {"template": lambda v: pa.array([[1]] * len(v))},
        {"template": None},
        {"attempt": lambda v: pa.array(["1"] * len(v))},
        {"attempt": lambda v: pa.array([2**32 - 1] * len(v), pa.uint32())},
    ],
)
def test_forged_shards_of_an_unfinished_build_are_refused(changed, trees):
    reshard(trees, table_of(trees, **changed))
    header, entries = stopped(trees)
    lines = (json.dumps(each) + "\n" for each in (header, *entries))
    (trees / "progress.jsonl").write_text("".join(lines))
    with pytest.raises(ValueError, match=TRAIN):
        build_set(TREES["listops"], trees)


def test_a_build_replaces_a_pipe_without_waiting_for_it(trees):
    header, entries = stopped(trees)
    lines = (json.dumps(each) + "\n" for each in (header, *entries))
    (trees / "progress.jsonl").write_text("".join(lines))
    replaced(trees / TRAIN, "pipe")
    with deadline(5):
        build_set(TREES["listops"], trees)
    assert shards.verify(trees) == []


def test_a_seed_beyond_the_limits_of_a_manifest_is_refused(tmp_path):
    with pytest.raises(ValueError, match="the seed of a set must be below"):
        build_set(listops.lra(counts=COUNTS, seed=2**63), tmp_path / "set")
    assert not (tmp_path / "set").exists()
