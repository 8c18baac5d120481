"""Import a release of a data set: read its files once and write them in the format of `shards.py`.

Rows are streamed; one shard at a time is in memory. The manifest is written last: an import that
was killed starts over when its command is repeated, and gives the same bytes. An import that fails
removes what it has written.
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

from dlrnn.common.files import PART, write_unlocked
from dlrnn.common.untrusted import printable
from dlrnn.tasks.random import SPLITS
from dlrnn.tasks.storage.archives import entries
from dlrnn.tasks.storage.build import (
    check_folder,
    found_header,
    locked,
    set_header,
    write_manifest,
)
from dlrnn.tasks.storage.shards import (
    MANIFEST,
    MAX_SAMPLES,
    PROGRESS,
    SHARD_NAME,
    TOKENIZER,
    Shard,
    not_generated,
    verify,
    whole_lines,
)


def schema_of(**types: pa.DataType) -> pa.Schema:
    """Return a schema of columns without empty cells; bytes are arrays of uint8."""
    bytes_ = {"dtype": "uint8"}
    return pa.schema(
        pa.field(name, kind, False, bytes_ if kind == pa.binary() else None)
        for name, kind in types.items()
    )


Row = tuple[str, Mapping[str, Any]]
"""A split and a sample of it, a mapping from column names to values."""


@dataclass(frozen=True)
class ImportedSet:
    """A `Spec` of a data set whose samples are read from files instead of generated."""

    name: str
    parameters: Mapping[str, Any]
    rows: Callable[[Path], Iterator[Row]]
    """Yields the samples of the files at a path; it may return a remark for the user."""
    schema: pa.Schema
    layout: str
    """The expected files, for error messages."""
    splits: tuple[str, ...]
    """Splits that must not be empty."""
    shard_rows: int
    group_rows: int
    order: Callable[[Mapping[str, Any]], Any] | None = None
    """The sort key of samples within a shard; None keeps the order of the files."""
    writer: Mapping[str, Any] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)  # not known before the import
    seed: int = 0
    bytes_per_sample: int = 0
    unique: str | None = None
    tokenizer: bytes | None = None
    """The tokenizer.json of the samples, which is stored with them."""

    def table(self, split: str, rows: range, attempts: Mapping[int, int]) -> pa.Table:
        """Raise ValueError: an imported data set is not generated."""
        raise ValueError(not_generated(self.name))


def write_set(
    spec: ImportedSet,
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    progress: Callable[[int, int | None], None] | None = None,
) -> Path:
    """Import a data set, unless it is complete; return its folder.

    `progress` gets the number of samples read so far, and None: their total is not known.
    """
    source, folder = Path(path), Path(out)
    if source.is_dir() and folder.resolve().is_relative_to(source.resolve()):
        raise ValueError(f"{folder} is inside {source}, which is read; choose another folder")
    header = set_header(spec)
    header["parameters"] = {**header["parameters"], **_source_parameters(source)}
    _check_folder(folder, header)
    new = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with locked(folder):
            _check_folder(folder, header)
            if not _is_complete(folder):
                _Importer(spec, folder, header, progress).make(source)
    except BaseException:
        for place in new:
            with contextlib.suppress(OSError):  # the folder is not empty
                place.rmdir()
        raise
    return folder


def _source_parameters(source: Path) -> dict[str, Any]:
    """Return what distinguishes one source from another without reading it."""
    sizes = (entry.size for entry in entries(source)) if source.is_dir() else None
    if sizes is None and not source.is_file():
        raise ValueError(f"there is no file or folder {source}")
    size = source.stat().st_size if sizes is None else sum(size or 0 for size in sizes)
    return {"source": printable(source.resolve().name), "source_bytes": size}


def _check_folder(folder: Path, header: dict[str, Any]) -> None:
    """Refuse a folder that contains anything but this data set or an unfinished import of it."""
    found = (found_header(folder) if folder.is_dir() else None) or {}
    ignored: dict[str, Any] = {key: found[key] for key in ("counts", "versions") if key in found}
    check_folder(folder, {**header, **ignored})


def _is_complete(folder: Path) -> bool:
    if not (folder / MANIFEST).exists():
        return False
    for path in (*folder.glob(f"*{PART}"), folder / PROGRESS):
        path.unlink(missing_ok=True)
    return not verify(folder)


class _Importer:
    """The only writer of a folder."""

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
        """Write the data set from the beginning; on an error, remove all that was written."""
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
        """Remove manifest and shards; the progress file already says that the folder is ours."""
        (self.folder / MANIFEST).unlink(missing_ok=True)
        for path in sorted(self.folder.iterdir()):
            is_part = path.name.endswith(PART) or SHARD_NAME.fullmatch(path.name)
            if is_part or path.name == TOKENIZER:
                path.unlink()

    def _add(self, split: str, row: Mapping[str, Any]) -> None:
        self.waiting[split].append(row)
        self.counts[split] += 1
        if self.counts[split] > MAX_SAMPLES:
            raise ValueError(f"a set has at most {MAX_SAMPLES} samples of {split}; import less")
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
        """Return the bytes of a shard, written row group by row group."""
        file, size = io.BytesIO(), self.spec.group_rows
        how = {"compression": "zstd", **self.spec.writer}
        with pq.ParquetWriter(file, self.spec.schema, **how) as writer:
            for first in range(0, len(rows), size):
                group = pa.Table.from_pylist(rows[first : first + size], schema=self.spec.schema)
                writer.write_table(group)
        return file.getvalue()

    def _finish(self) -> None:
        """Write the manifest, which makes the data set complete."""
        if self.spec.tokenizer is not None:
            write_unlocked(self.folder / TOKENIZER, self.spec.tokenizer)
        written = [entry for split in SPLITS[:3] for entry in self.entries[split]]
        manifest = {**self.header, "counts": self.counts, "shards": written}
        if self.remark is not None:
            manifest["remark"] = printable(self.remark)
        write_manifest(self.folder, manifest)
        if self.progress is not None:
            self.progress(sum(self.counts.values()), None)
