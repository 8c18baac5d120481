"""Read the files of releases: one file for each split, lines of text, Parquet files of the Hub."""

import io
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from dlrnn.tasks.storage.archives import ArchiveError, Entry, entries

LONGEST_LINE = 2**24  # bytes
LARGEST_CHUNK = 2**30  # bytes of a column in a row group of Parquet
FREE_BYTES, LARGEST_EXPANSION = 2**27, 8
"""Decoded texts of a Parquet file may have so many bytes plus so many times its uncompressed size:
more means that many rows refer to one long text in a dictionary."""
_HUB = re.compile(r"(?:.*/)?(train|validation|test)-\d{5}-of-\d{5}[^/]*\.parquet")


def split_files(
    path: Path, pattern: re.Pattern[str], splits: Mapping[str, str]
) -> Iterator[tuple[str, Entry]]:
    """Yield the only file of each split; the first group of `pattern` is a key of `splits`."""
    seen: set[str] = set()
    for entry in entries(path):
        if found := pattern.fullmatch(entry.name):
            split = splits[found[1]]
            if split in seen:
                raise ValueError(f"{entry.where} is a second file of {split} samples")
            seen.add(split)
            yield split, entry


def text_lines(where: str, file: io.BufferedIOBase, longest: int = LONGEST_LINE) -> Iterator[str]:
    """Yield lines of UTF-8 with their line ends; errors begin with `where`."""
    number = 0
    while line := file.readline(longest + 1):
        number += 1
        if len(line) > longest:
            raise ValueError(f"{where} line {number} is longer than {longest} bytes")
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")  # skip a byte order mark
        except UnicodeDecodeError:
            raise ValueError(f"{where} line {number} is not UTF-8") from None


def hub_split(name: str) -> str | None:
    """Return the split of a Parquet file named as on the Hugging Face Hub, None otherwise."""
    found = _HUB.fullmatch(name)
    return found[1] if found else None


def parquet_rows(entry: Entry, columns: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a description and the values of each row of a Parquet file in a folder."""
    where, number = entry.where, 0
    with entry.open() as file:
        if not file.seekable():
            advice = "unpack it and give the folder"
            raise ArchiveError(f"{where} is Parquet inside an archive; {advice}")
        try:
            parquet = pq.ParquetFile(file, pre_buffer=False)
            allowed = FREE_BYTES + LARGEST_EXPANSION * _checked_size(where, parquet, columns)
            # one row at a time: 64 references to a long text in a dictionary become 64 long texts
            for batch in parquet.iter_batches(1, columns=columns, use_threads=False):
                allowed -= batch.nbytes
                if allowed < 0:
                    much = "has far more text than its size: a long text is repeated"
                    advice = "write it without a dictionary, or use the original files"
                    raise ArchiveError(f"{where} {much}; {advice}")
                for row in batch.to_pylist():
                    yield f"{where} row {number}", row
                    number += 1
        except ArchiveError:
            raise
        except UnicodeDecodeError:
            raise ArchiveError(f"{where} is not UTF-8") from None
        except (pa.ArrowException, OSError, ValueError, OverflowError) as error:  # a date, say
            reason = " ".join(str(error).split())
            raise ArchiveError(f"{where} is damaged: {reason[:200]}") from None


def _checked_size(where: str, parquet: pq.ParquetFile, columns: list[str]) -> int:
    """Return the size of a file before compression.

    Missing columns, lists and large columns are refused: a few bytes may decode to many.
    """
    known = parquet.schema_arrow.names
    if lacking := [name for name in columns if name not in known]:
        raise ArchiveError(f"{where} has no column {lacking[0]!r}; it has {known}")
    groups = [parquet.metadata.row_group(group) for group in range(parquet.num_row_groups)]
    for place in range(len(parquet.schema)):
        leaf = parquet.schema.column(place)
        name = leaf.path.partition(".")[0]
        if name not in columns:
            continue
        if leaf.max_repetition_level > 0:
            raise ArchiveError(f"{where} has lists in its column {name!r}")
        for number, group in enumerate(groups):
            size = group.column(place).total_uncompressed_size
            if size > LARGEST_CHUNK:
                much = f"{size} bytes in its column {name!r}, row group {number}"
                raise ArchiveError(f"{where} has {much}; at most {LARGEST_CHUNK} were expected")
    return sum(group.total_byte_size for group in groups)
