"""Sets on disk: a folder of Parquet shards and a manifest, the same bytes everywhere.

folder/train-00000.parquet ...   `shard_rows` samples each, a function of the spec and the number
folder/manifest.json             what the set is, rows and SHA-256 of every shard; written last
folder/progress.jsonl            while it is being built: what it will be, then a line a shard
folder/tokenizer.json            of a set of tokens: what made them; its SHA-256 is a parameter

`build.py` writes them; here is what a set is, how it is checked and how it is read.
"""

import hashlib
import json
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from dlrnn._disk import naming
from dlrnn._untrusted import MOST_LINES, read_bytes
from dlrnn.tasks.random import SPLITS

FORMAT = 1
KEPT = 2**28  # bytes of decoded row groups that a reader keeps
OPEN = 64  # files: a large set has more than a process may have open
MANIFEST, PROGRESS = "manifest.json", "progress.jsonl"
TOKENIZER = "tokenizer.json"
SHARD_NAME = re.compile(rf"({'|'.join(SPLITS[:3])})-(\d{{5,}})\.parquet")


@runtime_checkable
class Spec(Protocol):
    """What a set is. Workers get a copy, so it must be a plain object of an importable class."""

    @property
    def name(self) -> str:
        """The task."""

    @property
    def seed(self) -> int:
        """Decides everything that is random."""

    @property
    def parameters(self) -> Mapping[str, Any]:
        """What else decides the samples, as JSON has it."""

    @property
    def counts(self) -> Mapping[str, int]:
        """Samples of each split."""

    @property
    def shard_rows(self) -> int:
        """Samples a shard."""

    @property
    def group_rows(self) -> int:
        """Samples a row group: what is read at once."""

    @property
    def writer(self) -> Mapping[str, Any]:
        """Options of `pyarrow.parquet.write_table`: how columns are encoded."""

    @property
    def bytes_per_sample(self) -> int:
        """On the disk, rounded up."""

    @property
    def unique(self) -> str | None:
        """A column of keys of which no two are equal; then a column `attempt` must exist."""

    def table(self, split: str, rows: range, attempts: Mapping[int, int]) -> pa.Table:
        """Samples of a split, each from the attempt that is given for it, else from attempt 0."""


@dataclass(frozen=True)
class Shard:
    """A file of a set: the samples `rows` of a split."""

    split: str
    number: int
    rows: range

    @property
    def file(self) -> str:
        """Its name in the folder."""
        return f"{self.split}-{self.number:05d}.parquet"


def scaled_counts(counts: Mapping[str, int], samples: int) -> dict[str, int]:
    """So many samples in the proportions of `counts`, at least one of each split."""
    if samples < len(counts):
        splits = f"{len(counts)}, one for each of {listed(counts)}"
        raise ValueError(f"samples must be at least {splits}, not {samples}")
    whole = sum(counts.values())
    held_out = {
        split: max(1, samples * count // whole)
        for split, count in counts.items()
        if split != "train"
    }
    return {"train": samples - sum(held_out.values()), **held_out}


# ---------------------------------------------------------------------------------- checking


def load_manifest(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """What a whole set says of itself."""
    folder = _there(folder)
    try:
        content = read_bytes(folder / MANIFEST, MOST_LINES, links=True)
        manifest = json.loads(content)
    except FileNotFoundError:
        begun = (folder / PROGRESS).exists()
        state = "was not built to its end; run its build again" if begun else "holds no set"
        raise ValueError(f"{folder} {state}") from None
    except ValueError:
        raise ValueError(f"{folder / MANIFEST} is damaged; it is not JSON") from None
    if not isinstance(manifest, dict) or manifest.get("sha256") != own_hash(manifest):
        raise ValueError(f"{folder / MANIFEST} is damaged; its SHA-256 is not that of its content")
    if manifest["format"] != FORMAT:
        newer = f"has format {manifest['format']}; this dlrnn reads {FORMAT}"
        raise ValueError(f"{folder / MANIFEST} {newer}")
    return manifest


def _there(folder: str | os.PathLike[str]) -> Path:
    folder = Path(folder)
    if not folder.exists():
        raise ValueError(f"there is no folder {folder}")
    if not folder.is_dir():
        raise ValueError(f"{folder} is a file; a folder was expected")
    return folder


def verify(
    folder: str | os.PathLike[str], *, progress: Callable[[int, int], None] | None = None
) -> list[str]:
    """One sentence for each thing that is wrong with a set; none when it is whole.

    `progress` gets the shards looked at and all of them.
    """
    folder = _there(folder)
    try:
        manifest = load_manifest(folder)
    except ValueError as error:
        return [str(error)]
    problems = []
    for place, entry in enumerate(manifest["shards"]):
        path = folder / entry["file"]
        if not path.is_file():
            problems.append(f"{entry['file']} is missing")
        elif sha256(path) != entry["sha256"]:
            problems.append(f"{entry['file']} is damaged: its SHA-256 is not the manifest's")
        elif (rows := pq.read_metadata(path).num_rows) != entry["rows"]:
            problems.append(f"{entry['file']} holds {rows} samples, not {entry['rows']}")
        if progress is not None:
            progress(place + 1, len(manifest["shards"]))
    for split, count in manifest["counts"].items():
        rows = sum(e["rows"] for e in manifest["shards"] if e["file"].startswith(f"{split}-"))
        if rows != count:
            problems.append(f"the shards of {split} hold {rows} samples, not {count}")
    known = {entry["file"] for entry in manifest["shards"]} | {MANIFEST}
    if (digest := manifest["parameters"].get("tokenizer")) is not None:
        known.add(TOKENIZER)
        if not (folder / TOKENIZER).is_file():
            problems.append(f"{TOKENIZER} is missing")
        elif sha256(folder / TOKENIZER) != digest:
            problems.append(f"{TOKENIZER} is damaged: its SHA-256 is not the manifest's")
    extra = sorted(path.name for path in folder.iterdir() if path.name not in known)
    return problems + [f"{name} does not belong to the set" for name in extra]


# ---------------------------------------------------------------------------------- reading


def read(
    folder: str | os.PathLike[str], split: str, *, columns: Sequence[str] | None = None
) -> "Split":
    """The samples of a split, read when they are asked for."""
    return Split(folder, split, columns=columns)


class Split:
    """`split[5]` is a sample, a dictionary; `split.batch([5, 9, 2])` has a list a column.

    Shards are mapped into memory; what is read at once is a row group, and the last ones stay
    decoded, KEPT bytes of them. A column of bytes gives an array of uint8, a list an array of its
    type. Threads may share a split.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        split: str,
        *,
        columns: Sequence[str] | None = None,
    ) -> None:
        self.manifest = load_manifest(folder)
        if split not in self.manifest["counts"]:
            there = listed(self.manifest["counts"])
            raise ValueError(f"{folder} has no split {split!r}; there are {there}")
        shards = [e for e in self.manifest["shards"] if e["file"].startswith(f"{split}-")]
        self._paths = [Path(folder) / entry["file"] for entry in shards]
        self._hashes = [entry["sha256"] for entry in shards]
        self._length: int = self.manifest["counts"][split]
        self.shard_rows: int = self.manifest["shard_rows"]
        self.columns = list(columns) if columns is not None else None
        self._open()
        self.group_rows = self._file(0).metadata.row_group(0).num_rows if self._paths else 1
        """Samples a row group (the last one of a shard may have fewer)."""
        if self.columns is not None and self._paths:
            known = self._file(0).schema_arrow.names
            for name in self.columns:
                if name not in known:
                    raise ValueError(f"{folder} has no column {name!r}; it has {listed(known)}")

    def _open(self) -> None:
        """What a loader's worker has of its own."""
        self._lock = threading.Lock()  # around what follows: a file has one reader at a time
        self._files: OrderedDict[int, pq.ParquetFile] = OrderedDict()
        self._whole: set[int] = set()  # shards whose hash was found right
        self._kept: OrderedDict[tuple[int, int], pa.Table] = OrderedDict()
        self._kept_bytes = 0

    def __getstate__(self) -> dict[str, Any]:
        own = ("_lock", "_files", "_whole", "_kept", "_kept_bytes")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: values[0] for name, values in self.batch([index]).items()}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(len(self)))

    def batch(self, indices: Sequence[int]) -> dict[str, list[Any]]:
        """Some samples in the order asked for; every row group is read once."""
        places: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for place, asked in enumerate(indices):
            index = asked + len(self) if asked < 0 else asked
            if not 0 <= index < len(self):
                raise IndexError(f"there is no sample {asked}; there are {len(self)}")
            shard, row = divmod(index, self.shard_rows)
            group, row = divmod(row, self.group_rows)
            places.setdefault((shard, group), []).append((place, row))
        found: dict[str, list[Any]] = {}
        for (shard, group), rows in places.items():
            table = self._group(shard, group)
            for name in table.column_names:
                values = found.setdefault(name, [None] * len(indices))
                column = table[name]
                for place, row in rows:
                    values[place] = _plain(column[row])
        return found

    def _file(self, shard: int) -> pq.ParquetFile:
        if shard not in self._files:
            path = self._paths[shard]
            with damage(path):
                if shard not in self._whole and sha256(path) != self._hashes[shard]:
                    raise pa.ArrowInvalid("it is not what was written")
                self._whole.add(shard)
                self._files[shard] = pq.ParquetFile(path, memory_map=True)
            if len(self._files) > OPEN:
                self._files.popitem(last=False)[1].close()
        self._files.move_to_end(shard)
        return self._files[shard]

    def _group(self, shard: int, group: int) -> pa.Table:
        place = shard, group
        with self._lock:
            if place not in self._kept:
                file = self._file(shard)
                with damage(self._paths[shard]):
                    table = file.read_row_group(group, columns=self.columns, use_threads=False)
                self._kept[place] = table
                self._kept_bytes += table.nbytes
                while self._kept_bytes > KEPT and len(self._kept) > 1:
                    self._kept_bytes -= self._kept.popitem(last=False)[1].nbytes
            self._kept.move_to_end(place)
            return self._kept[place]


@contextmanager
def damage(path: Path) -> Iterator[None]:
    """What pyarrow or the disk says, as a sentence about the file."""
    try:
        yield
    except FileNotFoundError:
        raise ValueError(f"{path} is missing: run its build or its import again") from None
    except (pa.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())
        advice = f"`dlrnn data verify {path.parent}` looks at every file"
        raise ValueError(f"{path} is damaged ({reason}): {advice}") from None


def _plain(value: pa.Scalar) -> Any:
    """Arrays for lists and bytes; text and what has a fixed size as Python has it."""
    if isinstance(value, pa.ListScalar):
        return value.values.to_numpy()
    as_it_is = (pa.FixedSizeBinaryScalar, pa.StringScalar)
    if isinstance(value, pa.BinaryScalar) and not isinstance(value, as_it_is):
        return np.frombuffer(value.as_buffer(), dtype=np.uint8)
    return value.as_py()


# ---------------------------------------------------------------------------------- helpers


def whole_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file that may end in a torn one."""
    lines: list[dict[str, Any]] = []
    if path.exists():
        for line in read_bytes(path, MOST_LINES).split(b"\n")[:-1]:
            try:
                lines.append(json.loads(line))
            except ValueError:
                break
    return lines


def sha256(path: Path) -> str:
    """Of a file's bytes."""
    with naming(path), open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def own_hash(manifest: dict[str, Any]) -> str:
    """Of all that a manifest says besides its own hash."""
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def listed(names: Iterable[str]) -> str:
    """For a sentence."""
    return ", ".join(sorted(names))
