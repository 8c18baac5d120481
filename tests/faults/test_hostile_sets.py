"""Forged data sets on disk are refused with an error that names the file, or are read."""

import json
import shutil
from hashlib import sha256
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from damage import GONE, plant, put, stop_build
from harness import assert_refused, guarded, refusal, run_command, run_well
from support import tiny_books

from dlrnn import tasks
from dlrnn.tasks import listops
from dlrnn.tasks.data import list_sets
from dlrnn.tasks.storage import columns, shards
from dlrnn.tasks.storage.build import build_set

TRAIN, MANIFEST = "train-00000.parquet", "manifest.json"
COUNTS = {"train": 8, "validation": 2, "test": 2}
TREES = {
    "listops": listops.lra(counts=COUNTS, shard_rows=5),
    "listops-subtrees": listops.subtrees(counts=COUNTS, min_length=54, max_length=63),
}
SETTINGS = {"listops": {}, "listops-subtrees": {"length": 64}, "pg19": {"length": 16}}


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """A folder with a set of each task of SETTINGS, under the task's name."""
    base = tmp_path_factory.mktemp("sets")
    for name, spec in TREES.items():
        build_set(spec, base / name)
    tiny_books(base).rename(base / "pg19")
    return base


@pytest.fixture
def copied(sets, tmp_path):
    return lambda name: Path(shutil.copytree(sets / name, tmp_path / name))


@pytest.fixture
def trees(copied):
    return copied("listops")


def forge(folder, *changes):
    """Change the manifest and update its hash, as an attacker would."""
    manifest = json.loads((folder / MANIFEST).read_text())
    for place, value in changes:
        put(manifest, place, value)
    if ("sha256", GONE) not in changes:
        manifest["sha256"] = shards.manifest_hash(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest))


def reshard(folder, content):
    """Replace the first shard of the training split by bytes or a table, and update its hash."""
    path = folder / TRAIN
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        pq.write_table(content, path, compression="zstd", row_group_size=20)
    entries = json.loads((folder / MANIFEST).read_text())["shards"]
    place = [each["file"] for each in entries].index(TRAIN)
    forge(folder, (f"shards.{place}.sha256", sha256(path.read_bytes()).hexdigest()))


def sampled(folder):
    """Read batches as training does."""
    task = tasks.get(folder.name, folder=str(folder), **SETTINGS[folder.name])
    with guarded():
        return [task.sample(2, step=step) for step in range(4)]


def verified(folder):
    with guarded():
        return shards.verify(folder)


def refused(folder, file, words="", *, verify=True):
    """Training and `data verify` name the file in an error of one line."""
    with refusal(folder / file, words):
        sampled(folder)
    assert not verify or any(file in each for each in verified(folder))


@pytest.mark.parametrize("name", SETTINGS)
def test_valid_sets_are_read(name, sets):
    """Without this test, the refusals below could have another cause."""
    assert verified(sets / name) == []
    sampled(sets / name)


# ---------------------------------------------------------------------------------- manifests

KEYS = ("format", "task", "parameters", "counts", "shards", "shard_rows", "seed", "versions")
WRONG = [
    *((name, value) for name in KEYS[1:] for value in (None, "text", ["a"], -1.5, {"a": None})),
    *((name, GONE) for name in (*KEYS, "sha256")),
    *(("shards", [None]), ("shards", [{"file": TRAIN}]), ("shards", [[TRAIN]]), ("unknown", 1)),
    *(("shards.0", {"rows": 5, "sha256": "x"}), ("shards.0.file", 3), ("shards.0.file", None)),
    *(("shards.0.file", f"train-x/../../listops/{TRAIN}"), ("shards.0.file", f"./{TRAIN}")),
    *(("shards.0.file", f"/tmp/{TRAIN}"), ("shards.0.file", "train-0000\u0660.parquet")),
    *(("shards.0.rows", 0), ("shards.0.rows", -1), ("shards.0.rows", 2**63)),
    *(("shard_rows", 0), ("shard_rows", -1), ("shard_rows", 10**12), ("shard_rows", True)),
    *(("counts.train", 10**11), ("counts.train", -1), ("counts.train", 1.0), ("counts.other", 1)),
    *(("parameters.max_length", None), ("parameters.max_length", -5), ("seed", 2**64)),
    *(("remark", "\x1b[31mred"), ("remark", 5), ("format", 2), ("format", [[[]]])),
]


@pytest.mark.parametrize(("place", "value"), WRONG, ids=lambda value: str(value)[:30])
def test_a_manifest_with_invalid_values_is_refused(place, value, trees):
    forge(trees, (place, value))
    refused(trees, MANIFEST)


def test_counts_that_contradict_the_shards_are_refused(trees):
    forge(trees, ("counts.train", 2**24), ("shard_rows", 2**20))
    refused(trees, MANIFEST, verify=False)
    assert "the shards of train hold 8 samples, not 16777216" in verified(trees)
    forge(trees, ("shards.0.rows", 10**12))
    refused(trees, MANIFEST, verify=False)
    forge(trees, ("shards", []))
    refused(trees, MANIFEST, verify=False)


def test_shards_out_of_order_are_refused(trees):
    reverse = json.loads((trees / MANIFEST).read_text())["shards"][::-1]
    forge(trees, ("shards", reverse))
    refused(trees, MANIFEST, "not numbered from 0", verify=False)
    forge(trees, ("shards", [*reverse, reverse[0]]))
    refused(trees, MANIFEST, verify=False)


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{", b"[]", b"null", b"[" * 200_000, b'{"a":' * 200_000, b"\xff\xfe"),
        *(b'{"seed": ' + b"9" * 5000, b'{"a": NaN}', b'{"a": 1, "a": 2}'),
    ],
    ids=lambda value: repr(value[:12]),
)
def test_a_manifest_that_is_not_json_is_refused(content, trees):
    (trees / MANIFEST).write_bytes(content)
    refused(trees, MANIFEST)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            (name, value)
            for name in ("length", "vocabulary")
            for value in (GONE, None, [1], 0, "a")
        ),
        *(("tokenizer", value) for value in (GONE, None, [1], 0)),
    ],
)
def test_parameters_that_a_language_model_needs_are_checked(name, value, copied):
    folder = copied("pg19")
    forge(folder, (f"parameters.{name}", value))
    refused(folder, MANIFEST, verify=False)


# ---------------------------------------------------------------------------------- files


@pytest.mark.parametrize("file", [MANIFEST, TRAIN])
@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "loop", "dangling"])
def test_special_files_are_refused(file, kind, trees):
    plant(trees / file, kind)
    with pytest.raises((ValueError, OSError)) as caught:
        sampled(trees)
    assert str(trees) in str(caught.value)
    if file == TRAIN:
        assert file in str(caught.value)
        assert any(each.startswith(file) for each in verified(trees))


def test_links_to_regular_files_are_followed(sets, tmp_path):
    """Shards of a large data set may be on another disk."""
    (tmp_path / "linked").mkdir()
    for path in (sets / "listops").iterdir():
        (tmp_path / "linked" / path.name).symlink_to(path)
    (tmp_path / "listops").symlink_to(tmp_path / "linked", target_is_directory=True)
    assert verified(tmp_path / "listops") == []
    sampled(tmp_path / "listops")
    [row] = list_sets(sets / "listops")
    assert row["state"] == "built"


@pytest.mark.parametrize("name", [MANIFEST, "progress.jsonl"])
@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "deep", "list", "counts"])
def test_a_listing_skips_invalid_data_sets(name, kind, sets, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(sets / "listops", tmp_path / "data" / "trees")
    other = tmp_path / "data" / "other"
    other.mkdir()
    header = {"task": "\x1b[31m", "counts": {"a": [1]}, "seed": 1}
    texts = {"deep": "[" * 200_000, "list": "[1]", "counts": json.dumps(header)}
    if kind in texts:
        (other / name).write_text(texts[kind])
    else:
        plant(other / name, kind)
    done = run_command(["data", "list", "--json"], seconds=5)
    assert (done.status, done.faults()) == (0, []), done
    assert [row["task"] for row in json.loads(done.out)] == ["listops"]


# ---------------------------------------------------------------------------------- shards


def with_column(folder, name, make):
    """The table of the first shard with another column, which `make` makes from the values."""
    table = pq.read_table(folder / TRAIN)
    if make is GONE:
        return table.drop_columns([name])
    column = make(table[name].to_pylist())
    return table.set_column(table.schema.get_field_index(name), name, column)


def every(value, kind=None):
    """A column in which every sample has this value."""
    return lambda values: pa.array([value] * len(values), kind)


def null(kind):
    """A column without its first value."""
    return lambda values: pa.array([None, *values[1:]], kind)


def filled(value, kind=None):
    """A column of lists of the same lengths, in which every entry has this value."""
    return lambda values: pa.array([[value] * len(each) for each in values], kind)


def shorter(values):
    """A column of lists without their first entries."""
    return pa.array([each[1:] for each in values], required(pa.uint8()))


def required(kind):
    """Lists without nulls."""
    return pa.list_(pa.field("element", kind, False))


BAD = [
    ("listops", "tokens", null(pa.binary())),
    ("listops", "tokens", every("[MAX 1 2 ]")),
    ("listops", "tokens", every(3, pa.int64())),
    ("listops", "tokens", every([3.5])),
    ("listops", "tokens", every(b"\xff" * 600)),
    ("listops", "tokens", every(b"\1" * 2001)),
    ("listops", "tokens", every(b"")),
    ("listops", "tokens", lambda values: pa.array(values, pa.binary()).dictionary_encode()),
    ("listops", "tokens", GONE),
    ("listops", "label", null(pa.uint8())),
    ("listops", "label", every(10, pa.uint8())),
    ("listops", "label", every(-1, pa.int8())),
    ("listops", "label", every("1")),
    ("listops", "label", every({"a": 1})),
    ("listops-subtrees", "values", filled(200, required(pa.uint8()))),
    ("listops-subtrees", "values", shorter),
    ("listops-subtrees", "values", filled(None, pa.list_(pa.uint8()))),
    ("listops-subtrees", "values", filled(1.0)),
    ("listops-subtrees", "values", null(pa.list_(pa.uint8()))),
    ("listops-subtrees", "positions", filled(6000, required(pa.uint16()))),
    ("listops-subtrees", "positions", filled([1])),
    ("pg19", "tokens", every([3] * 16, pa.list_(pa.uint16()))),
    ("pg19", "tokens", every([60_000] * 33, pa.list_(pa.uint16()))),
    ("pg19", "tokens", every([None] * 33, pa.list_(pa.uint16()))),
]


@pytest.mark.parametrize(("name", "column", "make"), BAD)
def test_invalid_samples_are_refused(name, column, make, copied):
    folder = copied(name)
    reshard(folder, with_column(folder, column, make))
    if make is GONE:
        with refusal("has no column 'tokens'"):
            sampled(folder)
    else:
        refused(folder, TRAIN)


@pytest.mark.parametrize("rows", [0, 4, 6])
def test_a_shard_of_another_size_is_refused(rows, trees):
    table = pq.read_table(trees / TRAIN)
    reshard(trees, pa.concat_tables([table, table])[:rows])
    refused(trees, TRAIN, f"holds {rows} samples, not 5")


def test_row_groups_of_another_size_are_refused(trees):
    path, table = trees / TRAIN, pq.read_table(trees / TRAIN)
    pq.write_table(table, path, row_group_size=2)
    reshard(trees, path.read_bytes())
    refused(trees, "train-00001.parquet", "its row groups are not of 2 samples")
    with pq.ParquetWriter(path, table.schema) as writer:
        for group in (table[:1], table[1:]):
            writer.write_table(group)
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


def test_flipped_bits_in_a_shard_with_a_valid_hash_do_not_crash(trees, case):
    """Reading gives samples, or an error that names the file."""
    whole = (trees / TRAIN).read_bytes()
    random = np.random.default_rng(0)
    for place in [*random.integers(0, len(whole), 40), *range(len(whole) - 300, len(whole), 6)]:
        broken = bytearray(whole)
        broken[place] ^= 1 << int(random.integers(8))
        reshard(trees, bytes(broken))
        with case(f"byte {place}"):
            problems = verified(trees)
            try:
                sampled(trees)
            except ValueError as error:
                problems.append(str(error))
            assert all(TRAIN in problem for problem in problems)


# ---------------------------------------------------------------------------------- bombs


def repeated(name, value, rows):
    """A table of a few KB: every row has the same value, by a dictionary, and a label."""
    value = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array([value]))
    return pa.table({name: value, "label": pa.array([0] * rows, pa.uint8())})


def write_small(table, path):
    """Write a table in one row group, into a file that is small."""
    rows = table.num_rows
    pq.write_table(table, path, compression="zstd", row_group_size=rows, store_schema=False)
    assert path.stat().st_size < 100_000


@pytest.mark.parametrize(("size", "rows"), [(2**16, 2**16), (2000, 2**16)])
def test_dictionary_bombs_are_refused(size, rows, trees, monkeypatch):
    """A file of a few KB decodes to 4 GiB, or to 128 MB of texts of a valid length."""
    monkeypatch.setattr(columns, "MAX_BYTES", 2**25)
    write_small(repeated("tokens", b"\1" * size, rows), trees / TRAIN)
    reshard(trees, (trees / TRAIN).read_bytes())
    first, _, *rest = json.loads((trees / MANIFEST).read_text())["shards"]
    sizes = [("counts.train", rows), ("shard_rows", rows)]
    forge(trees, ("shards", [{**first, "rows": rows}, *rest]), *sizes)
    refused(trees, TRAIN)


@pytest.mark.parametrize(("size", "rows"), [(2**26, 1000), (2**20, 4_000_000)])
def test_an_import_refuses_a_dictionary_bomb(size, rows, tmp_path):
    """A file of a few KB decodes to 64 GB, or to 4 TB of text."""
    (tmp_path / "set").mkdir()
    bomb = tmp_path / "set" / "train-00000-of-00001.parquet"
    write_small(repeated("text", "a" * size, rows), bomb)
    done = run_command(["data", "import", "text", bomb.parent, "--out", tmp_path / "out"])
    assert_refused(done, bomb.name)
    assert not list((tmp_path / "out").glob("*.parquet"))


@pytest.mark.parametrize(
    "dates", [pa.array([2**31 - 1] * 8, pa.date32()), pa.array([2**40] * 8, pa.timestamp("s"))]
)
@pytest.mark.parametrize("name", ["text", "label"])
def test_dates_that_python_does_not_have_are_refused(name, dates, tmp_path):
    path = tmp_path / "set" / "train-00000-of-00001.parquet"
    path.parent.mkdir()
    pq.write_table(pa.table({"text": ["a"] * 8, "label": [0] * 8, name: dates}), path)
    done = run_command(["data", "import", "text", path.parent, "--out", tmp_path / "out"])
    assert_refused(done, path.name)


def test_an_ordinary_dictionary_is_read(trees, tmp_path):
    """Files of the Hub have dictionaries, too."""
    pq.write_table(pq.read_table(trees / TRAIN), trees / TRAIN, use_dictionary=True)
    reshard(trees, (trees / TRAIN).read_bytes())
    sampled(trees)
    assert verified(trees) == []
    (tmp_path / "set").mkdir()
    for split in ("train", "test"):
        texts = [f"{split} review number {k}" for k in range(8)]
        path = tmp_path / "set" / f"{split}-00000-of-00001.parquet"
        pq.write_table(pa.table({"text": texts, "label": [0, 1] * 4}), path, use_dictionary=True)
    run_well(["data", "import", "text", tmp_path / "set", "--out", tmp_path / "out"])


def test_long_lists_are_refused_before_decoding(copied, monkeypatch):
    """Equal values need hardly any space."""
    monkeypatch.setattr(columns, "MAX_VALUES", 2**20)
    folder = copied("listops-subtrees")

    def long(values):
        ends = pa.array([0] * len(values) + [2**20 + 8], pa.int32())
        return pa.ListArray.from_arrays(ends, pa.array(np.zeros(2**20 + 8, np.uint8)))

    reshard(folder, with_column(folder, "values", long))
    refused(folder, TRAIN, "more than a data set may have")


def field(value):
    """A number of a Thrift structure: its type and its zigzag variable-length code."""
    coded, value = b"\x15", value << 1
    while value > 127:
        coded, value = coded + bytes([value & 127 | 128]), value >> 7
    return coded + bytes([value])


def test_sizes_in_page_headers(tmp_path):
    """Those of files that Arrow wrote, and of forged headers."""
    table = pa.table({"a": pa.array([[1, 2]] * 100), "b": pa.array([b"x" * k for k in range(100)])})
    path = tmp_path / "file"
    ways = ({}, {"use_dictionary": False}, {"data_page_version": "2.0"}, {"data_page_size": 64})
    for how in ways:
        pq.write_table(table, path, **how)
        metadata, content = pq.read_metadata(path), path.read_bytes()
        for place in range(2):
            chunk = metadata.row_group(0).column(place)
            start = chunk.dictionary_page_offset or chunk.data_page_offset
            found = columns.page_sizes(content, start, start + chunk.total_compressed_size)
            assert found.values >= chunk.num_values
            assert 0 < found.raw <= chunk.total_uncompressed_size
    page = field(0) + field(2**30) + field(3) + b"\x2c" + field(2**31 - 1) + b"\x00" + b"\x00"
    found = columns.page_sizes(b"PAR1" + page + b"abc", 4, 4 + len(page) + 3)
    assert found == (2**30, 2**31 - 1)
    for broken in (page[:-4], b"\xff" * 40, b"\x1c" * 40, b"", b"\x15\x00" * 3 + b"\x00"):
        with pytest.raises(pa.ArrowInvalid):
            columns.page_sizes(b"PAR1" + broken, 4, 5 + len(broken))


# ---------------------------------------------------------------------------------- building


@pytest.mark.parametrize("entry", [{}, {"file": 3, "sha256": "x"}, {"file": TRAIN}, {"rows": []}])
def test_a_forged_progress_file_is_refused(entry, trees):
    stop_build(trees, [entry])
    with refusal("progress.jsonl"):
        build_set(TREES["listops"], trees)


@pytest.mark.parametrize("content", ["[]\n", "3\n", "[" * 200_000 + "\n", '{"task": [[[]]]}\n'])
def test_a_damaged_progress_file_is_refused(content, trees):
    stop_build(trees)
    (trees / "progress.jsonl").write_text(content)
    with refusal("holds"):
        build_set(TREES["listops"], trees)


@pytest.mark.parametrize(
    ("column", "make"),
    [
        ("template", null(pa.binary(16))),
        ("template", every([1])),
        ("template", GONE),
        ("attempt", every("1")),
        ("attempt", every(2**32 - 1, pa.uint32())),
    ],
)
def test_forged_shards_of_an_unfinished_build_are_refused(column, make, trees):
    reshard(trees, with_column(trees, column, make))
    stop_build(trees)
    with refusal(TRAIN):
        build_set(TREES["listops"], trees)


def test_a_build_replaces_a_pipe_without_waiting_for_it(trees):
    stop_build(trees)
    plant(trees / TRAIN, "pipe")
    with guarded():
        build_set(TREES["listops"], trees)
    assert verified(trees) == []


def test_a_seed_beyond_the_limits_of_a_manifest_is_refused(tmp_path):
    with refusal("the seed of a set must be below"):
        build_set(listops.lra(counts=COUNTS, seed=2**63), tmp_path / "set")
    assert not (tmp_path / "set").exists()
