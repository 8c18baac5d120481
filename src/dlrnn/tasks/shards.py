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

from dlrnn.common.files import naming
from dlrnn.common.untrusted import (
    brief,
    fit,
    fit_fields,
    open_regular,
    parse_json,
    read_bytes,
)
from dlrnn.tasks.columns import Column, check_file, columns_of, read_group
from dlrnn.tasks.random import SPLITS

FORMAT = 1
KEPT = 2**28  # bytes of decoded row groups that a reader keeps
OPEN = 64  # files: a large set has more than a process may have open
MOST_FILE = 2**35  # bytes of a shard
MOST_ROWS, MOST_SAMPLES = 2**20, 2**24  # of a shard; of a split, whose order is drawn at once
MANIFEST, PROGRESS = "manifest.json", "progress.jsonl"
TOKENIZER = "tokenizer.json"
SHARD_NAME = re.compile(rf"({'|'.join(SPLITS[:3])})-(\d{{5,}})\.parquet", re.ASCII)


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


@dataclass(frozen=True)
class Entry:
    """What a manifest says of a shard."""

    file: str
    rows: int
    sha256: str


_SCHEMA = {
    **{"format": int, "task": str, "parameters": dict[str, Any], "seed": int},
    **{"counts": dict[str, int], "shard_rows": int, "versions": dict[str, str]},
    **{"shards": list[Entry], "remark": str, "sha256": str},
}
_SIZES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("listops", "listops-subtrees"), ("max_length",)),
    **dict.fromkeys(("pathfinder", "pathfinder-segmentation", "path-x"), ("resolution",)),
    **{"text": ("length",), "retrieval": ("length",), "pg19": ("length", "vocabulary")},
}
"""Parameters of our tasks that say how large their samples are."""


def load_manifest(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """What a whole set says of itself."""
    manifest = _read_manifest(folder)
    for problem in _disagreements(manifest):
        raise ValueError(f"{Path(folder) / MANIFEST} is damaged; {problem}")
    return manifest


def _read_manifest(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The same; its numbers may disagree with each other."""
    folder = _there(folder)
    path = folder / MANIFEST
    try:
        content = read_bytes(path, links=True)
    except FileNotFoundError:
        begun = (folder / PROGRESS).exists()
        state = "was not built to its end; run its build again" if begun else "holds no set"
        raise ValueError(f"{folder} {state}") from None
    try:
        manifest = parse_json(content, "it")
    except ValueError as error:
        what, _, reason = str(error).partition(": ")
        raise ValueError(f"{path} is damaged; {reason if 'usable' in what else what}") from None
    if not isinstance(manifest, dict) or manifest.get("sha256") != own_hash(manifest):
        raise ValueError(f"{path} is damaged; its SHA-256 is not that of its content")
    if manifest.get("format") != FORMAT:
        newer = f"has format {manifest.get('format')!r:.40}; this dlrnn reads {FORMAT}"
        raise ValueError(f"{path} {newer}")
    _check_manifest(manifest, str(path))
    return manifest


def _check_manifest(manifest: dict[str, Any], where: str) -> None:
    """Refuse types and values that no set has."""
    found = fit_fields(manifest, _SCHEMA, where, needed=_SCHEMA.keys() - {"remark"})
    for split, count in found["counts"].items():
        if split not in SPLITS[:3] or not 0 <= count <= MOST_SAMPLES:
            limits = f"at most {MOST_SAMPLES} samples of {listed(SPLITS[:3])} were expected"
            raise ValueError(f"{where} is damaged; it has {count} of {split[:40]!r}, and {limits}")
    if not 1 <= found["shard_rows"] <= MOST_ROWS:
        rows = f"shard_rows must be from 1 to {MOST_ROWS}, not {found['shard_rows']}"
        raise ValueError(f"{where} is damaged; {rows}")
    for entry in found["shards"]:
        if not SHARD_NAME.fullmatch(entry.file):
            raise ValueError(f"{where} is damaged; {entry.file[:80]!r} is no name of a shard")
        if entry.rows < 1:
            raise ValueError(f"{where} is damaged; {entry.file} has {entry.rows} samples")
    told = found["parameters"]
    sizes = {name: told.get(name) for name in _SIZES.get(found["task"], ())}
    for name, value in sizes.items():
        if type(value) is not int or not 1 <= value < 2**31:
            must = f"its parameter {name} must be a whole number of at least 1"
            raise ValueError(f"{where} is damaged; {must}, not {value!r:.40}")
    if "tokenizer" in told or found["task"] == "pg19":
        fit(told.get("tokenizer"), str, f"{where}: tokenizer")


def _disagreements(manifest: dict[str, Any]) -> list[str]:
    """Splits whose shards are not as their counts say, a sentence each."""
    problems = []
    size, parts = manifest["shard_rows"], _parts(manifest)
    for split, entries in parts.items():
        count = manifest["counts"].get(split, 0)
        if (rows := sum(entry["rows"] for entry in entries)) != count:
            problems.append(f"the shards of {split} hold {rows} samples, not {count}")
            continue
        wanted = [Shard(split, k, range(k * size, min((k + 1) * size, count))) for k in
                  range(len(entries))]  # fmt: skip
        if [(each.file, len(each.rows)) for each in wanted] != [
            (entry["file"], entry["rows"]) for entry in entries
        ]:
            problems.append(f"the shards of {split} are not numbered from 0, of {size} samples")
    return problems


def _parts(manifest: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The shards of each split."""
    parts: dict[str, list[dict[str, Any]]] = {split: [] for split in SPLITS[:3]}
    for entry in manifest["shards"]:
        parts[entry["file"].partition("-")[0]].append(entry)
    return parts


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

    Every sample is read. `progress` gets the shards looked at and all of them.
    """
    folder = _there(folder)
    try:
        manifest = _read_manifest(folder)
    except ValueError as error:
        return [str(error)]
    problems, done, columns = [], 0, columns_of(manifest["task"], manifest["parameters"])
    for entries in _parts(manifest).values():
        group_rows = 0
        for entry in entries:
            try:
                group_rows = _verify_shard(folder, Entry(**entry), group_rows, columns)
            except (ValueError, OSError) as error:
                reason = brief(error).removeprefix(f"{folder / entry['file']} ")
                problems.append(f"{entry['file']} {reason}")
            done += 1
            if progress is not None:
                progress(done, len(manifest["shards"]))
    problems += _disagreements(manifest)
    known = {entry["file"] for entry in manifest["shards"]} | {MANIFEST}
    if (digest := manifest["parameters"].get("tokenizer")) is not None:
        known.add(TOKENIZER)
        if not (folder / TOKENIZER).is_file():
            problems.append(f"{TOKENIZER} is missing")
        elif sha256(folder / TOKENIZER) != digest:
            problems.append(f"{TOKENIZER} is damaged: its SHA-256 is not the manifest's")
    extra = sorted(path.name for path in folder.iterdir() if path.name not in known)
    return problems + [f"{name} does not belong to the set" for name in extra]


def _verify_shard(
    folder: Path, entry: Entry, group_rows: int, columns: Mapping[str, Column]
) -> int:
    """Samples of a row group; what is wrong is raised, without the name of the file."""
    path = folder / entry.file
    try:
        digest = sha256(path)
    except FileNotFoundError:
        raise ValueError("is missing") from None
    if digest != entry.sha256:
        raise ValueError("is damaged: its SHA-256 is not the manifest's")
    try:
        with pq.ParquetFile(path, memory_map=True) as file:
            if (rows := file.metadata.num_rows) != entry.rows:
                raise ValueError(f"holds {rows} samples, not {entry.rows}")
            first = check_file(file, entry.rows, group_rows, columns)
            for group in range(file.num_row_groups):
                read_group(file, path, group, None, columns)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"is damaged: {brief(error)}") from None
    return group_rows or first


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
        self._entries = [Entry(**entry) for entry in _parts(self.manifest)[split]]
        self._paths = [Path(folder) / entry.file for entry in self._entries]
        self._expected = columns_of(self.manifest["task"], self.manifest["parameters"])
        self._length: int = self.manifest["counts"][split]
        self.shard_rows: int = self.manifest["shard_rows"]
        self.columns = list(columns) if columns is not None else None
        self.group_rows = 0
        """Samples a row group (the last one of a shard may have fewer)."""
        self._open()
        if self._paths:
            self._file(0)
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
        self._sound: set[tuple[int, int]] = set()  # row groups whose samples were found right
        self._kept: OrderedDict[tuple[int, int], pa.Table] = OrderedDict()
        self._kept_bytes = 0

    def __getstate__(self) -> dict[str, Any]:
        own = ("_lock", "_files", "_whole", "_sound", "_kept", "_kept_bytes")
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
            path, entry = self._paths[shard], self._entries[shard]
            with damage(path):
                if shard not in self._whole and sha256(path) != entry.sha256:
                    raise pa.ArrowInvalid("it is not what was written")
                file = pq.ParquetFile(path, memory_map=True)
                if shard not in self._whole:
                    first = check_file(file, entry.rows, self.group_rows, self._expected)
                    self.group_rows = self.group_rows or first
                self._whole.add(shard)
                self._files[shard] = file
            if len(self._files) > OPEN:
                self._files.popitem(last=False)[1].close()
        self._files.move_to_end(shard)
        return self._files[shard]

    def _group(self, shard: int, group: int) -> pa.Table:
        place = shard, group
        with self._lock:
            if place not in self._kept:
                file, path = self._file(shard), self._paths[shard]
                with damage(path):
                    if place in self._sound:
                        table = file.read_row_group(group, columns=self.columns, use_threads=False)
                    else:
                        table = read_group(file, path, group, self.columns, self._expected)
                        self._sound.add(place)
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
    except (pa.ArrowException, OSError, ValueError) as error:  # names that are no UTF-8, too
        if str(path) in str(error):
            raise
        reason = brief(error, 300)
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
    """The whole lines of a file that may end in a torn one, each a JSON object."""
    lines: list[dict[str, Any]] = []
    if path.exists():
        for line in read_bytes(path).split(b"\n")[:-1]:
            try:
                lines.append(fit(parse_json(line, "it"), dict[str, Any], "it"))
            except ValueError:
                break
    return lines


def sha256(path: Path) -> str:
    """Of the bytes of a regular file; sets may lie behind links."""
    with open_regular(path, links=True) as file, naming(path):
        if os.fstat(file.fileno()).st_size > MOST_FILE:
            raise ValueError(f"{path} has more than {MOST_FILE} bytes, which no shard has")
        return hashlib.file_digest(file, "sha256").hexdigest()


def own_hash(manifest: dict[str, Any]) -> str:
    """Of all that a manifest says besides its own hash."""
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def listed(names: Iterable[str]) -> str:
    """For a sentence."""
    return ", ".join(sorted(names))
