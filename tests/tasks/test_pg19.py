"""PG-19: import of books as streams of tokens, memory use, refusals, and the task."""

import hashlib
import itertools
import json
import os
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from releases import hashes, parquet, refused, write_folder, write_tar, write_zip
from support import WORDS, run_python, tiny_books, tiny_tokenizer

from dlrnn import tasks
from dlrnn.tasks import pg19
from dlrnn.tasks.data import import_set
from dlrnn.tasks.pg19 import books_set, make_tokenizer
from dlrnn.tasks.storage import archives, shards
from dlrnn.tasks.storage.imports import write_set

TEXT = " ".join(WORDS[(k * k) % 30] for k in range(200))


@pytest.fixture
def tokenizer(tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(tiny_tokenizer())
    return tmp_path / "tokenizer.json"


def ids(text):
    return [2 + WORDS.index(word) for word in text.split()]


def stream(folder, split):
    """The concatenated tokens of a split."""
    blocks = [row["tokens"] for row in shards.Split(folder, split)]
    for before, after in itertools.pairwise(blocks):
        assert before[-1] == after[0]
    return [*np.concatenate([block[:-1] for block in blocks]).tolist(), int(blocks[-1][-1])]


def official(folder, text=TEXT):
    for split in ("train", "validation", "test"):
        (folder / split).mkdir(parents=True)
        for number in range(2):
            content = f"{WORDS[number]} {text}"
            (folder / split / f"{number}.txt").write_text(content)
    return folder


# ---------------------------------------------------------------------------------- import


def test_books_are_concatenated_with_end_tokens(tmp_path, tokenizer):
    source = official(tmp_path / "books")
    folder = write_set(books_set(tokenizer, 16), source, tmp_path / "set")
    whole = [t for k in range(2) for t in [*ids(f"{WORDS[k]} {TEXT}"), 1]]
    for split in ("train", "validation", "test"):
        assert stream(folder, split) == whole[: (len(whole) - 1) // 16 * 16 + 1]
    assert (folder / "tokenizer.json").read_bytes() == tokenizer.read_bytes()
    parameters = shards.load_manifest(folder)["parameters"]
    assert parameters["vocabulary"] == 32
    assert parameters["tokenizer"] == hashlib.sha256(tokenizer.read_bytes()).hexdigest()
    assert shards.verify(folder) == []
    (folder / "tokenizer.json").write_bytes(b"{}")
    assert shards.verify(folder) == ["tokenizer.json is damaged: its SHA-256 is not the manifest's"]


def test_every_container_gives_the_same_bytes(tmp_path, tokenizer):
    source = official(tmp_path / "books")
    books = sorted(source.rglob("*.txt"))
    files = {f"x/{path.relative_to(source)}": path.read_bytes() for path in books}
    rows = {}
    for split in ("train", "validation", "test"):
        texts = [path.read_text() for path in sorted((source / split).iterdir())]
        table = {"short_book_title": ["a", "b"], "text": texts}
        rows[f"{split}-00000-of-00001.parquet"] = parquet(table)
    sources = [
        source,
        write_tar(tmp_path / "books.tar.xz", files),
        write_zip(tmp_path / "books.zip", files),
        write_folder(tmp_path / "rows", rows),
    ]
    made = [
        hashes(write_set(books_set(tokenizer, 16), each, tmp_path / f"set-{each.name}"))
        for each in sources
    ]
    assert made[0] == made[1] == made[2] == made[3]


def test_pieces_end_before_a_space(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(pg19, "PIECE", 50)
    monkeypatch.setattr(pg19, "PIECES", 3)
    source = official(tmp_path / "books", TEXT.replace(" ", "\r\n", 20) + " " + "x" * 120)
    for path in source.rglob("*.txt"):
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())  # the byte order mark
    folder = write_set(books_set(tokenizer, 16), source, tmp_path / "set")
    assert stream(folder, "train")[:200] == ids(f"{WORDS[0]} {TEXT}")[:200]
    pieces = list(pg19.text_pieces(iter(["aa bb", " cc " + "d" * 120, " e"])))
    assert "".join(pieces) == "aa bb cc " + "d" * 120 + " e"
    assert [len(piece) for piece in pieces] == [8, 50, 50, 23]


def test_books_without_a_split_are_held_out_by_their_names(tmp_path, tokenizer):
    folder = tmp_path / "novels"
    folder.mkdir()
    for number in range(40):
        (folder / f"book{number}.txt").write_text(f"{WORDS[number % 30]} " * 40)
    found = write_set(books_set(tokenizer, 8), folder, tmp_path / "set")
    expected = {"train": [], "validation": [], "test": []}
    for name in sorted(path.name for path in folder.iterdir()):
        digit = int.from_bytes(hashlib.sha256(name.encode()).digest()) % 10
        expected[{0: "test", 1: "validation"}.get(digit, "train")].append(name)
    assert all(len(names) > 1 for names in expected.values())
    for split, names in expected.items():
        first = ids((folder / names[0]).read_text())[0]
        assert stream(found, split)[:41] == [first] * 40 + [1]
        assert shards.load_manifest(found)["counts"][split] == (41 * len(names) - 1) // 8


@pytest.mark.parametrize("where", ["{}/part1", "part1/{}", "a/{}/b/c"])
def test_books_at_any_depth_keep_their_split(tmp_path, tokenizer, where):
    plain, deep = official(tmp_path / "plain"), tmp_path / "deep"
    for path in plain.rglob("*.txt"):
        to = deep / where.format(path.parent.name) / path.name
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, to)
    found = [
        write_set(books_set(tokenizer, 16), source, tmp_path / f"set-{source.name}")
        for source in (plain, deep)
    ]
    for split in ("train", "validation", "test"):
        assert stream(found[0], split) == stream(found[1], split)


@pytest.mark.parametrize(
    "name",
    ["test-00000-of-00001.parquet", "data/test.parquet", "test/a.parquet", "test/x/0.parquet"],
)
def test_parquet_files_name_their_split(tmp_path, name):
    write_folder(tmp_path, {name: parquet({"text": ["w1"]})})
    assert [split for split, _ in pg19.read_books(tmp_path)] == ["test"]


def test_rows_that_share_a_long_text_are_read_one_at_a_time(tmp_path):
    """64 references to 1 MB in the dictionary of a small file."""
    table = pa.table({"text": ["word " * 200_000] * 64})
    pq.write_table(table, tmp_path / "train.parquet", compression="zstd")
    del table
    assert (tmp_path / "train.parquet").stat().st_size < 5000
    before = pa.total_allocated_bytes()
    taken = [pa.total_allocated_bytes() - before for _ in pg19.read_books(tmp_path)]
    assert len(taken) == 64
    assert max(taken) < 10e6


def test_a_large_parquet_column_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "LARGEST_CHUNK", 10_000)
    pq.write_table(pa.table({"text": ["a" * 20_000]}), tmp_path / "a.parquet", compression="zstd")
    with pytest.raises(ValueError, match=r"a.parquet has \d+ bytes in its column 'text', row gro"):
        list(pg19.read_books(tmp_path))


@pytest.mark.parametrize(
    ("name", "data", "keywords"),
    [
        ("test/1.txt", b"good \xff bad", r"test/1.txt is not UTF-8"),
        ("zzz.txt", b"w1", r"test/0.txt in a folder of a split and zzz.txt in none"),
        ("train/a.parquet", b"PAR1 no", r"a.parquet is damaged: "),
        (
            "train/a.parquet",
            {"words": ["a"]},
            r"has no column 'text'; it has \['words'\]",
        ),
        ("train/test/9.txt", b"w1", r"train/test/9.txt is in two splits"),
        ("train/test-00000-of-00001.parquet", {"text": ["w1"]}, r"00001.parquet is in two splits"),
        ("train/a.parquet", {"text": [5]}, r"row 0 must be text, not int"),
        ("train/a.parquet", {"text": [b"five"]}, r"row 0 must be text, not bytes"),
        (
            "train/a.parquet",
            {"text": [["five"]]},
            r"a.parquet has lists in its column 'text'",
        ),
    ],
)
def test_a_failed_import_leaves_nothing(tmp_path, tokenizer, name, data, keywords):
    source = official(tmp_path / "books")
    write_folder(source, {name: data if isinstance(data, bytes) else parquet(data)})
    refused("pg19", source, tmp_path, keywords, tokenizer=tokenizer)


def test_too_few_tokens_for_a_split_are_refused(tmp_path, tokenizer):
    source = official(tmp_path / "books")
    shutil.rmtree(source / "validation")
    lacks = r"no validation samples of pg19; a folder of books .* 16 tokens"
    with pytest.raises(ValueError, match=lacks):
        write_set(books_set(tokenizer, 16), source, tmp_path / "set")


def test_a_vocabulary_may_have_gaps():
    sparse = json.loads(tiny_tokenizer())
    sparse["model"]["vocab"] = {word: 3 * k for k, word in enumerate(sparse["model"]["vocab"])}
    sparse["added_tokens"] = []
    largest = max(sparse["model"]["vocab"].values())
    assert pg19.vocabulary_of(make_tokenizer(json.dumps(sparse).encode(), "x")) == largest + 1


def test_invalid_tokenizers_are_refused(tmp_path, tokenizer):
    source = official(tmp_path / "books")
    out = tmp_path / "set"
    (tmp_path / "bad.json").write_text("{}")
    for name, file, keywords in (
        ("pg19", None, r"pg19 needs a tokenizer: .*--tokenizer FILE"),
        ("pg19", tmp_path / "no.json", r"there is no file .*no.json"),
        ("pg19", tmp_path / "bad.json", r"bad.json is not a usable tokenizer.json: "),
        ("text", tokenizer, "text takes no tokenizer"),
    ):
        with pytest.raises(ValueError, match=keywords):
            import_set(name, source, out, tokenizer=file)
    endless = tiny_tokenizer().replace(b"</s>", b"<s>")
    with pytest.raises(ValueError, match="x has no end token"):
        pg19.end_token(make_tokenizer(endless, "x"), "x")
    assert not out.exists()
    out.mkdir()
    shutil.copy(tokenizer, out)
    with pytest.raises(ValueError, match="holds shards of an unknown set"):
        import_set("pg19", source, out, tokenizer=tokenizer)
    assert (out / "tokenizer.json").exists(), "a user's file stays"


STATUS = "/proc/self/status"
PEAK = """
import sys
from pathlib import Path
from dlrnn.tasks.pg19 import books_set
from dlrnn.tasks.storage.imports import write_set
base = Path(sys.argv[1])
write_set(books_set(base / "tokenizer.json", 256), base / "books", base / "set")
(line,) = (each for each in open("/proc/self/status") if each.startswith("VmHWM"))
print(int(line.split()[1]) / 1024)
"""


@pytest.mark.skipif(not os.path.exists(STATUS), reason="only Linux reports the memory of a process")
def test_memory_does_not_grow_with_the_text(tmp_path, tokenizer):
    """Another 32 MB of text, in one line, need less than half as much memory."""
    peaks = []
    for name, megabytes in (("short", 8), ("long", 40)):
        base = tmp_path / name
        for split in ("train", "validation", "test"):
            (base / "books" / split).mkdir(parents=True)
            words = megabytes * 200_000 if split == "train" else 600
            (base / "books" / split / "a.txt").write_text("word " * words)
        shutil.copy(tokenizer, base)
        peaks.append(float(run_python(PEAK, str(base))))
    assert peaks[1] - peaks[0] < 16


# ---------------------------------------------------------------------------------- the task


def test_targets_are_the_next_tokens(tmp_path):
    folder = tiny_books(tmp_path)
    task = tasks.get("pg19", folder=folder, length=32)
    batch = task.sample(3, split="validation")
    tokens = torch.tensor(stream(folder, "validation"))
    assert torch.equal(batch.inputs.flatten(), tokens[:96])
    assert torch.equal(batch.targets.flatten(), tokens[1:97])
    assert (task.vocabulary, task.d_output, task.input_length) == (32, 32, 32)
    assert set(task.files()) == {"tokenizer.json"}


def test_shorter_sequences_are_parts_of_blocks(tmp_path):
    folder = tiny_books(tmp_path)
    whole, short = (tasks.get("pg19", folder=folder, length=n) for n in (32, 8))
    assert short.count("test") == 4 * whole.count("test") == 4 * 21
    blocks = whole.sample(21, split="test").inputs
    parts = short.sample(84, split="test").inputs
    assert torch.equal(parts.view(4, 21, 8).transpose(0, 1).reshape(21, 32), blocks)
    every = torch.cat([short.sample(21, step=k).inputs for k in range(4)])
    trained = whole.sample(21).inputs.view(-1, 8)
    assert sorted(map(tuple, every.tolist())) == sorted(map(tuple, trained.tolist()))
    assert tasks.get("pg19", folder=folder, length=8, held_out=5).count("test") == 5


def test_loss_and_perplexity():
    task = tasks.get("pg19", length=4)
    batch = tasks.Batch(torch.zeros(2, 4).long(), torch.zeros(2, 4).long())
    log_losses = torch.arange(8.0).view(2, 4)
    assert task.loss(log_losses, batch) == 3.5
    halves = [tasks.Batch(*(part[k : k + 1] for part in batch[:2])) for k in range(2)]
    total = sum(task.totals(half) for half in halves)
    assert sum(task.loss(log_losses[k : k + 1], halves[k], total) for k in range(2)) == 3.5
    assert task.summary({"loss": 0.0}) == {"loss": 0.0, "perplexity": 1.0}
    assert task.weight(batch) == 8


def test_lengths_that_do_not_divide_a_block_are_refused(tmp_path):
    folder = tiny_books(tmp_path)
    with pytest.raises(ValueError, match="32 tokens, which a length of 5 does not divide"):
        tasks.get("pg19", folder=folder, length=5).count("train")
    assert tasks.get("pg19", folder=folder, length=32).preview().axes[0].texts


def test_a_file_name_that_is_not_utf8_has_a_split():
    assert pg19.hashed_split("caf\udce9.txt") in ("train", "validation", "test")
