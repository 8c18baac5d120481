"""Sets that are imported: what a user has, read once and written as `shards.py` has sets.

Rows are streamed and a shard at a time is in memory. The manifest comes last; killed before, the
same command starts over, and the bytes are the same. What cannot be imported leaves nothing.
"""

import contextlib
import hashlib
import io
import json
import os
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from dlrnn.common.files import PART, sync, write_unlocked
from dlrnn.common.untrusted import printable
from dlrnn.tasks.archives import entries
from dlrnn.tasks.build import _check_folder, _found, _header, _locked
from dlrnn.tasks.random import SPLITS
from dlrnn.tasks.shards import (
    MANIFEST,
    MOST_SAMPLES,
    PROGRESS,
    SHARD_NAME,
    TOKENIZER,
    Shard,
    own_hash,
    verify,
    whole_lines,
)

Row = tuple[str, Mapping[str, Any]]
"""A split and a sample of it, its columns by their names."""


@dataclass(frozen=True)
class ImportedSet:
    """What an imported set is: a `Spec` whose samples come from files instead of a generator."""

    name: str
    parameters: Mapping[str, Any]
    rows: Callable[[Path], Iterator[Row]]
    """The samples in what is at a path; a generator may return a remark, for the user."""
    schema: pa.Schema
    layout: str
    """What is looked for, for a sentence."""
    splits: tuple[str, ...]
    """Those that may not be empty."""
    shard_rows: int
    group_rows: int
    order: Callable[[Mapping[str, Any]], Any] | None = None
    """Samples of a shard are sorted by it; None keeps them as they come."""
    writer: Mapping[str, Any] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)  # nobody knows before
    seed: int = 0
    bytes_per_sample: int = 0
    unique: str | None = None
    tokenizer: bytes | None = None
    """The tokenizer.json that makes the samples, kept with them."""

    def table(self, split: str, rows: range, attempts: Mapping[int, int]) -> pa.Table:
        """Refused: nothing is drawn."""
        raise ValueError(no_draw(self.name))


def no_draw(name: str) -> str:
    """For a task that was given no set."""
    return (
        f"{name} is real data, not drawn on the spot: write it once with "
        f"`dlrnn data import {name} PATH` and give the task its folder"
    )


def import_set(
    name: str,
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    tokenizer: str | os.PathLike[str] | None = None,
    progress: Callable[[int, int | None], None] | None = None,
) -> Path:
    """Write the set of the task `name` from a folder, an archive or a file at `path`."""
    sets = imported_sets(tokenizer)
    if name not in sets:
        raise ValueError(f"there is no set {name!r} to import; there are: {', '.join(sets)}")
    if tokenizer is not None and sets[name].tokenizer is None:
        raise ValueError(f"{name} takes no tokenizer")
    return write_set(sets[name], path, out, progress=progress)


def imported_sets(tokenizer: str | os.PathLike[str] | None = None) -> dict[str, ImportedSet]:
    """Every set that can be imported, by the name of its task."""
    from dlrnn.tasks.books import books_set
    from dlrnn.tasks.lra import listops_release, path_x_release, pathfinder_release
    from dlrnn.tasks.retrieval import retrieval_set  # these import this file
    from dlrnn.tasks.speech import speech_set
    from dlrnn.tasks.text import text_set

    books = books_set(None if tokenizer is None else Path(tokenizer))
    lra = (listops_release(), pathfinder_release(), path_x_release())
    made = (text_set(), retrieval_set(), *lra, speech_set(), books)
    return {each.name: each for each in made}


def write_set(
    spec: ImportedSet,
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    progress: Callable[[int, int | None], None] | None = None,
) -> Path:
    """Write a set, or find it whole; `progress` gets the samples done and None, not yet known."""
    source, folder = Path(path), Path(out)
    if source.is_dir() and folder.resolve().is_relative_to(source.resolve()):
        raise ValueError(f"{folder} is inside {source}, which is read; choose a folder elsewhere")
    header = _header(spec)
    header["parameters"] = {**header["parameters"], **_told(source)}
    _refuse_others(folder, header)
    new = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with _locked(folder):
            _refuse_others(folder, header)
            if not _is_whole(folder):
                _Importer(spec, folder, header, progress).make(source)
    except BaseException:
        for place in new:
            with contextlib.suppress(OSError):  # somebody put something there
                place.rmdir()
        raise
    return folder


def _told(source: Path) -> dict[str, Any]:
    """What tells one source from another without reading it."""
    sizes = (entry.size for entry in entries(source)) if source.is_dir() else None
    if sizes is None and not source.is_file():
        raise ValueError(f"there is no file or folder {source}")
    size = source.stat().st_size if sizes is None else sum(size or 0 for size in sizes)
    return {"source": printable(source.resolve().name), "source_bytes": size}


def _refuse_others(folder: Path, header: dict[str, Any]) -> None:
    """A folder may hold this set, or a begun import of it, which begins anew."""
    found = (_found(folder) if folder.is_dir() else None) or {}
    free = ("counts", "versions")
    _check_folder(folder, {**header, **{k: v for k, v in found.items() if k in free}})


def _is_whole(folder: Path) -> bool:
    if not (folder / MANIFEST).exists():
        return False
    for path in (*folder.glob(f"*{PART}"), folder / PROGRESS):
        path.unlink(missing_ok=True)
    return not verify(folder)


class _Importer:
    """The one writer of a folder."""

    def __init__(
        self,
        spec: ImportedSet,
        folder: Path,
        header: dict[str, Any],
        progress: Callable[[int, int | None], None] | None,
    ) -> None:
        self.spec, self.folder, self.header, self.progress = spec, folder, header, progress
        self.waiting: dict[str, list[Mapping[str, Any]]] = {split: [] for split in SPLITS[:3]}
        self.entries: dict[str, list[dict[str, Any]]] = {split: [] for split in SPLITS[:3]}
        self.counts = dict.fromkeys(SPLITS[:3], 0)
        self.remark: str | None = None

    def make(self, source: Path) -> None:
        """All of it, from the beginning; what goes wrong leaves nothing."""
        if not whole_lines(self.folder / PROGRESS):
            write_unlocked(self.folder / PROGRESS, json.dumps(self.header).encode() + b"\n")
        self._clear()
        try:
            for split, row in self._rows(source):
                self._add(split, row)
            for split in SPLITS[:3]:
                self._flush(split)
                if split in self.spec.splits and not self.counts[split]:
                    lacks = f"{source} holds no {split} samples of {self.spec.name}"
                    raise ValueError(f"{lacks}; {self.spec.layout} was expected")
        except BaseException:
            self._clear()
            (self.folder / PROGRESS).unlink(missing_ok=True)
            raise
        self._finish()

    def _rows(self, source: Path) -> Iterator[Row]:
        rows = cast("Generator[Row, None, str | None]", self.spec.rows(source))
        self.remark = yield from rows

    def _clear(self) -> None:
        """Remove the manifest and the shards, never before it is noted that they are ours."""
        (self.folder / MANIFEST).unlink(missing_ok=True)
        for path in sorted(self.folder.iterdir()):
            ours = path.name.endswith(PART) or SHARD_NAME.fullmatch(path.name)
            if ours or path.name == TOKENIZER:
                path.unlink()

    def _add(self, split: str, row: Mapping[str, Any]) -> None:
        self.waiting[split].append(row)
        self.counts[split] += 1
        if self.counts[split] > MOST_SAMPLES:
            raise ValueError(f"a set has at most {MOST_SAMPLES} samples of {split}; import less")
        if len(self.waiting[split]) == self.spec.shard_rows:
            self._flush(split)
        done = sum(self.counts.values())
        if self.progress is not None and done % 1000 == 0:
            self.progress(done, None)

    def _flush(self, split: str) -> None:
        rows, self.waiting[split] = self.waiting[split], []
        if not rows:
            return
        if self.spec.order is not None:
            rows.sort(key=self.spec.order)
        stop = self.counts[split]
        shard = Shard(split, len(self.entries[split]), range(stop - len(rows), stop))
        data = self._encoded(rows)
        write_unlocked(self.folder / shard.file, data)
        digest = hashlib.sha256(data).hexdigest()
        self.entries[split].append({"file": shard.file, "rows": len(rows), "sha256": digest})

    def _encoded(self, rows: list[Mapping[str, Any]]) -> bytes:
        """The bytes of a shard, a row group after the other."""
        file, size = io.BytesIO(), self.spec.group_rows
        how = {"compression": "zstd", **self.spec.writer}
        with pq.ParquetWriter(file, self.spec.schema, **how) as writer:
            for first in range(0, len(rows), size):
                group = pa.Table.from_pylist(rows[first : first + size], schema=self.spec.schema)
                writer.write_table(group)
        return file.getvalue()

    def _finish(self) -> None:
        """The manifest: from now on the set is whole."""
        if self.spec.tokenizer is not None:
            write_unlocked(self.folder / TOKENIZER, self.spec.tokenizer)
        written = [entry for split in SPLITS[:3] for entry in self.entries[split]]
        manifest = {**self.header, "counts": self.counts, "shards": written}
        if self.remark is not None:
            manifest["remark"] = printable(self.remark)
        manifest["sha256"] = own_hash(manifest)
        write_unlocked(self.folder / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
        (self.folder / PROGRESS).unlink()
        sync(self.folder)
        if self.progress is not None:
            self.progress(sum(self.counts.values()), None)
