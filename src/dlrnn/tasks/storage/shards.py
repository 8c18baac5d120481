"""The format of data sets on disk: a folder of Parquet shards and a manifest.

folder/train-00000.parquet ...   `shard_rows` samples each, a function of the spec and the number
folder/manifest.json             the spec, rows and SHA-256 of every shard; written last
folder/progress.jsonl            during a build: the manifest's header, then a line for each shard
folder/tokenizer.json            only for tokens: their tokenizer; its SHA-256 is a parameter

The same spec gives the same bytes on every machine. This module defines the format, verifies it and
reads it; `build.py` and `imports.py` write it.
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
from typing import Any

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
from dlrnn.tasks.random import SPLITS
from dlrnn.tasks.storage.columns import Column, check_file, columns_of, read_group

FORMAT = 1
CACHE_BYTES = 2**28  # decoded row groups that a reader keeps
MAX_FILE_BYTES = 2**35
MAX_SHARD_ROWS, MAX_SAMPLES = 2**20, 2**24  # of a shard; of a split, which is shuffled at once
MANIFEST, PROGRESS = "manifest.json", "progress.jsonl"
TOKENIZER = "tokenizer.json"
SHARD_NAME = re.compile(rf"({'|'.join(SPLITS[:3])})-(\d{{5,}})\.parquet", re.ASCII)


@dataclass(frozen=True)
class Shard:
    """A file of a data set: the samples `rows` of a split."""

    split: str
    number: int
    rows: range

    @property
    def file(self) -> str:
        """The name of the file."""
        return shard_name(self.split, self.number)


def shard_name(split: str, number: int) -> str:
    """Return the file of a shard."""
    return f"{split}-{number:05d}.parquet"


def shards_of(counts: Mapping[str, int], shard_rows: int) -> list[Shard]:
    """Return the shards of a data set."""
    return [
        Shard(split, number, range(first, min(first + shard_rows, counts[split])))
        for split in SPLITS[:3]
        for number, first in enumerate(range(0, counts.get(split, 0), shard_rows))
    ]


# ---------------------------------------------------------------------------------- manifest


@dataclass(frozen=True)
class Entry:
    """A shard in a manifest."""

    file: str
    rows: int
    sha256: str


_SCHEMA = {
    **{"format": int, "task": str, "parameters": dict[str, Any], "seed": int},
    **{"counts": dict[str, int], "shard_rows": int, "versions": dict[str, str]},
    **{"shards": list[Entry], "remark": str, "sha256": str},
}


def load_manifest(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the manifest of a complete data set, checked."""
    manifest = _read_manifest(folder)
    for problem in _inconsistencies(manifest):
        raise ValueError(f"{Path(folder) / MANIFEST} is damaged; {problem}")
    return manifest


def _read_manifest(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return a manifest whose shards and counts may be inconsistent."""
    folder = Path(folder)
    if not folder.exists():
        raise ValueError(f"there is no folder {folder}")
    if not folder.is_dir():
        raise ValueError(f"{folder} is a file; a folder was expected")
    path = folder / MANIFEST
    try:
        content = read_bytes(path, links=True)
    except FileNotFoundError:
        begun = (folder / PROGRESS).exists()
        state = "was not built to its end; run its build again" if begun else "holds no set"
        raise ValueError(f"{folder} {state}") from None
    try:
        manifest = parse_json(content, "it")
        if not isinstance(manifest, dict) or manifest.get("sha256") != manifest_hash(manifest):
            raise ValueError("its SHA-256 is not that of its content")
        if manifest.get("format") == FORMAT:
            _check_manifest(manifest)
            return manifest
    except ValueError as error:
        raise ValueError(f"{path} is damaged; {brief(error)}") from None
    other = f"has format {manifest.get('format')!r:.40}; this dlrnn reads format {FORMAT}"
    raise ValueError(f"{path} {other}")


def _check_manifest(manifest: dict[str, Any]) -> None:
    """Refuse types and values that no data set has."""
    found = fit_fields(manifest, _SCHEMA, "it", needed=_SCHEMA.keys() - {"remark"})
    for split, count in found["counts"].items():
        if split not in SPLITS[:3] or not 0 <= count <= MAX_SAMPLES:
            limits = f"expected at most {MAX_SAMPLES} samples of {listed(SPLITS[:3])}"
            raise ValueError(f"it has {count} of {split[:40]!r}; {limits}")
    if not 1 <= found["shard_rows"] <= MAX_SHARD_ROWS:
        limits = f"from 1 to {MAX_SHARD_ROWS}, not {found['shard_rows']}"
        raise ValueError(f"shard_rows must be {limits}")
    for entry in found["shards"]:
        if not SHARD_NAME.fullmatch(entry.file):
            raise ValueError(f"{entry.file[:80]!r} is not a shard's name")
        if entry.rows < 1:
            raise ValueError(f"{entry.file} has {entry.rows} samples")
    parameters = found["parameters"]
    columns_of(found["task"], parameters)
    if "tokenizer" in parameters or found["task"] == "pg19":
        fit(parameters.get("tokenizer"), str, "its tokenizer")


def _inconsistencies(manifest: dict[str, Any]) -> list[str]:
    """Return a sentence for each split whose shards contradict its count."""
    problems = []
    size = manifest["shard_rows"]
    for split, entries in _parts(manifest).items():
        count = manifest["counts"].get(split, 0)
        expected = [
            (shard_name(split, number), min(size, count - number * size))
            for number in range(len(entries))
        ]
        if (rows := sum(entry.rows for entry in entries)) != count:
            problems.append(f"the shards of {split} hold {rows} samples, not {count}")
        elif [(entry.file, entry.rows) for entry in entries] != expected:
            problems.append(f"the shards of {split} are not numbered from 0, of {size} samples")
    return problems


def _parts(manifest: dict[str, Any]) -> dict[str, list[Entry]]:
    """Return the shards of each split."""
    parts: dict[str, list[Entry]] = {split: [] for split in SPLITS[:3]}
    for entry in manifest["shards"]:
        parts[entry["file"].partition("-")[0]].append(Entry(**entry))
    return parts


def manifest_hash(manifest: dict[str, Any]) -> str:
    """Return the SHA-256 of a manifest without its entry `sha256`."""
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


# ---------------------------------------------------------------------------------- reading


def open_shard(
    path: Path, entry: Entry, group_rows: int, columns: Mapping[str, Column]
) -> tuple[pq.ParquetFile, int]:
    """Open a shard and check its hash, size and types; return also the samples of a row group.

    `group_rows` of 0 accepts any. The errors are of pyarrow, the disk, or a ValueError.
    """
    if sha256(path) != entry.sha256:
        raise pa.ArrowInvalid("its SHA-256 is not the manifest's")
    file = pq.ParquetFile(path, memory_map=True)
    return file, check_file(file, entry.rows, group_rows, columns)


def verify(
    folder: str | os.PathLike[str], *, progress: Callable[[int, int], None] | None = None
) -> list[str]:
    """Read every sample; return a sentence for each problem, none if the data set is complete.

    `progress` gets the number of shards verified so far and the number of all shards.
    """
    folder = Path(folder)
    try:
        manifest = _read_manifest(folder)
    except ValueError as error:
        if not folder.is_dir():
            raise
        return [str(error)]
    problems, done, columns = [], 0, columns_of(manifest["task"], manifest["parameters"])
    for entries in _parts(manifest).values():
        group_rows = 0
        for entry in entries:
            path = folder / entry.file
            try:
                file, group_rows = open_shard(path, entry, group_rows, columns)
                with file:
                    for group in range(file.num_row_groups):
                        read_group(file, path, group, None, columns)
            except FileNotFoundError:
                problems.append(f"{entry.file} is missing")
            except (pa.ArrowException, OSError, ValueError) as error:
                problems.append(f"{entry.file} is damaged: {brief(error)}")
            done += 1
            if progress is not None:
                progress(done, len(manifest["shards"]))
    problems += _inconsistencies(manifest)
    known = {entry["file"] for entry in manifest["shards"]} | {MANIFEST}
    if (digest := manifest["parameters"].get("tokenizer")) is not None:
        known.add(TOKENIZER)
        if not (folder / TOKENIZER).is_file():
            problems.append(f"{TOKENIZER} is missing")
        elif sha256(folder / TOKENIZER) != digest:
            problems.append(f"{TOKENIZER} is damaged: its SHA-256 is not the manifest's")
    extra = sorted(path.name for path in folder.iterdir() if path.name not in known)
    return problems + [f"{name} does not belong to the set" for name in extra]


class Split:
    """The samples of a split, which are read when they are indexed.

    `split[5]` is a sample, a dictionary; `split.batch([5, 9, 2])` is a list of samples.

    Shards are memory-mapped and read one row group at a time; the last CACHE_BYTES of decoded row
    groups are cached. A column of bytes gives uint8 arrays, a column of lists arrays of its type.
    Threads may share a split.
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
        self._folder, self._entries = Path(folder), _parts(self.manifest)[split]
        self._expected = columns_of(self.manifest["task"], self.manifest["parameters"])
        self._length: int = self.manifest["counts"][split]
        self.shard_rows: int = self.manifest["shard_rows"]
        self.columns = list(columns) if columns is not None else None
        self.group_rows = 0
        """Samples of a row group (the last one of a shard may have fewer)."""
        self._lock = threading.Lock()  # protects the rest
        self._verified: set[int] = set()  # shards whose hash is right
        self.cache: OrderedDict[tuple[int, int], pa.Table] = OrderedDict()
        """Decoded row groups by (shard, group)."""
        self._cached_bytes = 0
        if self._entries:
            with naming_damage(self._folder / self._entries[0].file), self._file(0) as file:
                known = file.schema_arrow.names
            for name in self.columns or ():
                if name not in known:
                    raise ValueError(f"{folder} has no column {name!r}; it has {listed(known)}")

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.batch([index])[0]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(len(self)))

    def batch(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return samples in the given order; every row group is read once."""
        places: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for place, given in enumerate(indices):
            index = given + len(self) if given < 0 else given
            if not 0 <= index < len(self):
                raise IndexError(f"there is no sample {given}; there are {len(self)}")
            shard, row = divmod(index, self.shard_rows)
            group, row = divmod(row, self.group_rows)
            places.setdefault((shard, group), []).append((place, row))
        found: list[dict[str, Any]] = [{} for _ in indices]
        for (shard, group), rows in places.items():
            table = self._group(shard, group)
            for name, column in zip(table.column_names, table.columns, strict=True):
                for place, row in rows:
                    found[place][name] = _python_value(column[row])
        return found

    def _file(self, shard: int) -> pq.ParquetFile:
        """Open a shard, the first time with all checks."""
        entry = self._entries[shard]
        path = self._folder / entry.file
        if shard in self._verified:
            return pq.ParquetFile(path, memory_map=True)
        file, self.group_rows = open_shard(path, entry, self.group_rows, self._expected)
        self._verified.add(shard)
        return file

    def _group(self, shard: int, group: int) -> pa.Table:
        place, path = (shard, group), self._folder / self._entries[shard].file
        with self._lock:
            if place not in self.cache:
                with naming_damage(path), self._file(shard) as file:
                    table = read_group(file, path, group, self.columns, self._expected)
                self.cache[place] = table
                self._cached_bytes += table.nbytes
                while self._cached_bytes > CACHE_BYTES and len(self.cache) > 1:
                    self._cached_bytes -= self.cache.popitem(last=False)[1].nbytes
            self.cache.move_to_end(place)
            return self.cache[place]


@contextmanager
def naming_damage(path: Path) -> Iterator[None]:
    """Turn errors of pyarrow or the disk into a ValueError that names the file."""
    try:
        yield
    except FileNotFoundError:
        raise ValueError(f"{path} is missing: run its build or its import again") from None
    except (pa.ArrowException, OSError, ValueError) as error:  # ValueError: text that is not UTF-8
        if str(path) in str(error):
            raise
        reason = brief(error, 300)
        advice = f"`dlrnn data verify {path.parent}` checks every file"
        raise ValueError(f"{path} is damaged ({reason}): {advice}") from None


def _python_value(value: pa.Scalar) -> Any:
    """Return an array for a list or bytes, a Python value for text and bytes of a fixed size."""
    if isinstance(value, pa.ListScalar):
        return value.values.to_numpy()
    if pa.types.is_binary(value.type):
        return np.frombuffer(value.as_buffer(), dtype=np.uint8)
    return value.as_py()


# ---------------------------------------------------------------------------------- helpers


def whole_lines(path: Path) -> list[dict[str, Any]]:
    """Return the JSON objects in the lines of a file; a truncated last line is ignored."""
    lines: list[dict[str, Any]] = []
    if path.exists():
        for line in read_bytes(path).split(b"\n")[:-1]:
            try:
                lines.append(fit(parse_json(line, "it"), dict[str, Any], "it"))
            except ValueError:
                break
    return lines


def sha256(path: Path) -> str:
    """Return the SHA-256 of a regular file; links are followed."""
    with open_regular(path, links=True) as file, naming(path):
        if os.fstat(file.fileno()).st_size > MAX_FILE_BYTES:
            raise ValueError(f"{path} has more than {MAX_FILE_BYTES} bytes, the limit of a shard")
        return hashlib.file_digest(file, "sha256").hexdigest()


def listed(names: Iterable[str]) -> str:
    """Return names in alphabetical order, separated by commas."""
    return ", ".join(sorted(names))
