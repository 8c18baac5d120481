"""Import a release of a data set: read its files once and write them in the format of `shards.py`.

Rows are streamed; one shard at a time is in memory. The manifest is written last: an import that
was killed starts over when its command is repeated, and gives the same bytes. An import that fails
removes what it has written.
"""

import contextlib
import json
import os
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from dlrnn.common.files import PART, write_unlocked
from dlrnn.common.untrusted import printable
from dlrnn.tasks.random import SPLITS
from dlrnn.tasks.storage.archives import entries
from dlrnn.tasks.storage.build import check_folder, locked, set_header, write_manifest, write_shard
from dlrnn.tasks.storage.shards import (
    MANIFEST,
    MAX_SAMPLES,
    PROGRESS,
    SHARD_NAME,
    TOKENIZER,
    Entry,
    Shard,
    verify,
    whole_lines,
)
from dlrnn.tasks.storage.specs import ImportedSet, Row, Sample, encoded, table_of

_UNKNOWN = ("counts", "versions")  # entries of a header that an unfinished import may have


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
    parameters = {**spec.parameters, **_source_parameters(source)}
    header = set_header(spec.name, parameters, spec.shard_rows, {})
    check_folder(folder, header, _UNKNOWN)
    new = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with locked(folder):
            check_folder(folder, header, _UNKNOWN)
            if not _is_complete(folder):
                _Importer(spec, folder, progress).make(source, header)
    except BaseException:
        for place in new:
            with contextlib.suppress(OSError):  # the folder is not empty
                place.rmdir()
        raise
    return folder


def _source_parameters(source: Path) -> dict[str, Any]:
    """Return what distinguishes one source from another without reading it."""
    if source.is_dir():
        size = sum(entry.size or 0 for entry in entries(source))
    elif source.is_file():
        size = source.stat().st_size
    else:
        raise ValueError(f"there is no file or folder {source}")
    return {"source": printable(source.resolve().name), "source_bytes": size}


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
        progress: Callable[[int, int | None], None] | None,
    ) -> None:
        self.spec, self.folder, self.progress = spec, folder, progress
        self.waiting: dict[str, list[Sample]] = {split: [] for split in SPLITS[:3]}
        self.entries: dict[str, list[Entry]] = {split: [] for split in SPLITS[:3]}
        self.counts = dict.fromkeys(SPLITS[:3], 0)
        self.remark: str | None = None

    def make(self, source: Path, header: dict[str, Any]) -> None:
        """Write the data set from the beginning; on an error, remove all that was written."""
        if not whole_lines(self.folder / PROGRESS):
            write_unlocked(self.folder / PROGRESS, json.dumps(header).encode() + b"\n")
        self._clear()
        try:
            self._write_samples(source)
        except BaseException:
            self._clear()
            (self.folder / PROGRESS).unlink(missing_ok=True)
            raise
        if self.spec.tokenizer is not None:
            write_unlocked(self.folder / TOKENIZER, self.spec.tokenizer)
        written = [asdict(entry) for split in SPLITS[:3] for entry in self.entries[split]]
        manifest = {**header, "counts": self.counts, "shards": written}
        if self.remark is not None:
            manifest["remark"] = printable(self.remark)
        write_manifest(self.folder, manifest)
        if self.progress is not None:
            self.progress(sum(self.counts.values()), None)

    def _clear(self) -> None:
        """Remove manifest and shards; the progress file already says that the folder is ours."""
        (self.folder / MANIFEST).unlink(missing_ok=True)
        for path in sorted(self.folder.iterdir()):
            is_part = path.name.endswith(PART) or SHARD_NAME.fullmatch(path.name)
            if is_part or path.name == TOKENIZER:
                path.unlink()

    def _samples(self, source: Path) -> Iterator[Row]:
        rows = cast("Generator[Row, None, str | None]", self.spec.rows(source))
        self.remark = yield from rows

    def _write_samples(self, source: Path) -> None:
        for split, sample in self._samples(source):
            self._add(split, sample)
        for split in SPLITS[:3]:
            self._flush(split)
            if split in self.spec.splits and not self.counts[split]:
                lacks = f"{source} holds no {split} samples of {self.spec.name}"
                raise ValueError(f"{lacks}; {self.spec.layout} was expected")

    def _add(self, split: str, sample: Sample) -> None:
        self.waiting[split].append(sample)
        self.counts[split] += 1
        if self.counts[split] > MAX_SAMPLES:
            raise ValueError(f"a set has at most {MAX_SAMPLES} samples of {split}; import less")
        if len(self.waiting[split]) == self.spec.shard_rows:
            self._flush(split)
        done = sum(self.counts.values())
        if self.progress is not None and done % 1000 == 0:
            self.progress(done, None)

    def _flush(self, split: str) -> None:
        samples, self.waiting[split] = self.waiting[split], []
        if not samples:
            return
        if self.spec.order is not None:
            samples.sort(key=self.spec.order)
        stop = self.counts[split]
        shard = Shard(split, len(self.entries[split]), range(stop - len(samples), stop))
        table = table_of(samples, self.spec.schema)
        data = encoded(table, self.spec.group_rows, self.spec.writer)
        self.entries[split].append(write_shard(self.folder, shard, data))
