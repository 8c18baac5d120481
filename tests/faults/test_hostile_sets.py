"""Data sets of other people: a set is refused with one sentence that names its file, or is read."""

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
from dlrnn.tasks import columns, data_cli, listops, shards
from dlrnn.tasks.build import build_set

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
    """Change the manifest, with a right hash: whoever can write a manifest can compute it."""
    path = folder / MANIFEST
    manifest = json.loads(path.read_text())
    change(manifest)
    manifest["sha256"] = shards.own_hash(manifest)
    path.write_text(json.dumps(manifest))


def reshard(folder, content, file=TRAIN):
    """Replace a shard by bytes or a table of as many rows, with a right hash."""
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
    """What training reads."""
    task = tasks.get(name, folder=str(folder), **SETTINGS.get(name, {}))
    with bounded_memory(), deadline(10):
        return [task.sample(2, step=step) for step in range(4)]


def refused(folder, file, words=".", name="listops", *, verify=True):
    """By training and by `data verify`, each time with one sentence that names the file."""
    with pytest.raises(ValueError, match=words) as caught:
        sampled(folder, name)
    assert str(folder / file) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000
    if verify:
        with bounded_memory(), deadline(10):
            problems = shards.verify(folder)
        assert any(file in each for each in problems), problems


def test_valid_sets_are_read(made):
    """Without this, every refusal below could be of something else."""
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
def test_a_manifest_that_no_set_has_is_refused(name, value, trees):
    forge(trees, put(name, value))
    refused(trees, MANIFEST)


@pytest.mark.parametrize("name", [*KEYS, "sha256"])
def test_a_manifest_that_lacks_a_key_is_refused(name, trees):
    forge(trees, lambda manifest: manifest.pop(name, None))
    if name == "sha256":
        manifest = json.loads((trees / MANIFEST).read_text())
        del manifest["sha256"]
        (trees / MANIFEST).write_text(json.dumps(manifest))
    refused(trees, MANIFEST)


def test_counts_and_shards_agree(trees):
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


def test_shards_come_in_order(trees):
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
def test_a_file_that_is_none_is_refused(file, kind, trees):
    replaced(trees / file, kind)
    with pytest.raises((ValueError, OSError)) as caught, deadline(5):
        sampled(trees)
    assert str(trees) in str(caught.value)
    if file == TRAIN:
        assert file in str(caught.value)
        assert any(each.startswith(file) for each in shards.verify(trees))


def test_links_to_regular_files_are_followed(made, tmp_path):
    """A large set may lie on another disk, shard by shard."""
    (tmp_path / "linked").mkdir()
    for path in (made / "listops").iterdir():
        (tmp_path / "linked" / path.name).symlink_to(path)
    (tmp_path / "whole").symlink_to(tmp_path / "linked", target_is_directory=True)
    assert shards.verify(tmp_path / "whole") == []
    sampled(tmp_path / "whole")
    [row] = data_cli.found(made / "listops")
    assert row["state"] == "built"


@pytest.mark.parametrize("name", [MANIFEST, "progress.jsonl"])
@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "deep", "list", "counts"])
def test_a_listing_passes_over_what_is_no_set(name, kind, made, tmp_path, monkeypatch):
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
    told = run_command(["data", "list", "--json"], seconds=5)
    assert told.status == 0, told
    assert not told.faults()
    assert [row["task"] for row in json.loads(told.out)] == ["listops"]


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
def test_samples_that_cannot_be_are_refused(what, trees):
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
def test_trees_whose_values_have_no_place_are_refused(changed, copied):
    folder = copied("listops-subtrees")
    reshard(folder, table_of(folder, **changed))
    refused(folder, TRAIN, name="listops-subtrees")


@pytest.mark.parametrize("tokens", [[3] * 16, [60_000] * 33, [None] * 33])
def test_tokens_that_a_language_model_cannot_read_are_refused(tokens, copied):
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


def test_row_groups_are_as_in_the_first_shard(trees):
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
def test_garbage_is_refused_by_name(content, trees):
    reshard(trees, content)
    refused(trees, TRAIN)
    told = run_command(["data", "verify", trees])
    assert (told.status, told.faults()) == (1, [])


def said_of(folder):
    """What training says, if it says something."""
    try:
        sampled(folder)
    except ValueError as error:
        return [str(error)]
    return []


def test_flipped_bits_of_a_shard_with_a_right_hash_crash_nothing(trees):
    """Whatever Arrow says of it: a sentence that names the file, or samples."""
    whole = (trees / TRAIN).read_bytes()
    random = np.random.default_rng(0)
    places = [*random.integers(0, len(whole), 40), *range(len(whole) - 300, len(whole), 6)]
    for place in places:
        broken = bytearray(whole)
        broken[place] ^= 1 << int(random.integers(8))
        reshard(trees, bytes(broken))
        assert all(TRAIN in each for each in said_of(trees))
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
def test_texts_that_refer_to_a_dictionary_are_bounded(size, rows, trees, monkeypatch):
    """A few KB of file; 4 GiB of text, and 128 MB of texts of the right length."""
    monkeypatch.setattr(columns, "MOST_GROUP", 2**25)
    bomb(trees, repeated(size, rows), row_group_size=rows)
    refused(trees, TRAIN)


def test_an_ordinary_dictionary_is_read(trees):
    table = table_of(trees)
    pq.write_table(table, trees / TRAIN, use_dictionary=True)
    reshard(trees, (trees / TRAIN).read_bytes())
    sampled(trees)
    assert shards.verify(trees) == []


def test_long_lists_are_refused_undecoded(copied, monkeypatch):
    """Equal values take next to no room."""
    monkeypatch.setattr(columns, "MOST_VALUES", 2**20)
    folder = copied("listops-subtrees")
    ends = pa.array([0] * 8 + [2**20 + 8], pa.int32())
    values = pa.ListArray.from_arrays(ends, pa.array(np.zeros(2**20 + 8, np.uint8)))
    table = table_of(folder).drop_columns(["values"]).append_column("values", values)
    pq.write_table(table, folder / TRAIN, compression="zstd", row_group_size=20)
    reshard(folder, (folder / TRAIN).read_bytes())
    refused(folder, TRAIN, "which no set has", name="listops-subtrees")


def varint(value):
    coded = b""
    while value > 127:
        coded, value = coded + bytes([value & 127 | 128]), value >> 7
    return coded + bytes([value])


def number(value):
    return varint(value << 1)


def test_headers_of_pages_are_read_and_not_believed(tmp_path):
    """What Arrow's own files say, and what a forged header may."""
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
            told = metadata.row_group(0).column(place)
            start = told.dictionary_page_offset or told.data_page_offset
            found = columns._pages(content, start, start + told.total_compressed_size)
            assert found.values >= told.num_values
            assert 0 < found.raw <= told.total_uncompressed_size
    page = b"\x15" + number(0) + b"\x15" + number(2**30) + b"\x15" + number(3)
    page += b"\x2c" + b"\x15" + number(2**31 - 1) + b"\x00" + b"\x00"
    found = columns._pages(b"PAR1" + page + b"abc", 4, 4 + len(page) + 3)
    assert found == (2**30, 2**31 - 1)
    for broken in (page[:-4], b"\xff" * 40, b"\x1c" * 40, b"", b"\x15\x00" * 3 + b"\x00"):
        with pytest.raises(pa.ArrowInvalid):
            columns._pages(b"PAR1" + broken, 4, 5 + len(broken))


# ---------------------------------------------------------------------------------- building


def stopped(folder):
    """The build of a set that was stopped before its manifest."""
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).unlink()
    header = {key: value for key, value in manifest.items() if key not in ("shards", "sha256")}
    return header, manifest["shards"]


@pytest.mark.parametrize("entry", [{}, {"file": 3, "sha256": "x"}, {"file": TRAIN}, {"rows": []}])
def test_a_build_does_not_believe_its_progress(entry, trees):
    header, _ = stopped(trees)
    lines = (json.dumps(each) + "\n" for each in (header, entry))
    (trees / "progress.jsonl").write_text("".join(lines))
    with pytest.raises(ValueError, match=r"progress\.jsonl"):
        build_set(TREES["listops"], trees)


@pytest.mark.parametrize("content", ["[]\n", "3\n", "[" * 200_000 + "\n", '{"task": [[[]]]}\n'])
def test_a_progress_that_is_none_is_refused(content, trees):
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
def test_a_build_does_not_believe_its_shards(changed, trees):
    reshard(trees, table_of(trees, **changed))
    header, entries = stopped(trees)
    lines = (json.dumps(each) + "\n" for each in (header, *entries))
    (trees / "progress.jsonl").write_text("".join(lines))
    with pytest.raises(ValueError, match=TRAIN):
        build_set(TREES["listops"], trees)


def test_a_build_does_not_wait_for_a_pipe(trees):
    header, entries = stopped(trees)
    lines = (json.dumps(each) + "\n" for each in (header, *entries))
    (trees / "progress.jsonl").write_text("".join(lines))
    replaced(trees / TRAIN, "pipe")
    with deadline(5):
        build_set(TREES["listops"], trees)  # it is drawn again
    assert shards.verify(trees) == []


def test_what_a_manifest_cannot_say_is_refused_before_it_is_built(tmp_path):
    with pytest.raises(ValueError, match="the seed of a set must be below"):
        build_set(listops.lra(counts=COUNTS, seed=2**63), tmp_path / "set")
    assert not (tmp_path / "set").exists()
