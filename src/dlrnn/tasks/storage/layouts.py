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
        found = pattern.fullmatch(entry.name)
        if found is None:
            continue
        split = splits[found[1]]
        if split in seen:
            raise ValueError(f"{path}: {entry.name} is a second file of {split} samples")
        seen.add(split)
        yield split, entry


def text_lines(where: str, file: io.BufferedReader, longest: int = LONGEST_LINE) -> Iterator[str]:
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


def parquet_rows(path: Path, entry: Entry, columns: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a Parquet file in a folder, with these columns."""
    where = f"{path}: {entry.name}"
    with entry.open() as file:
        if not file.seekable():
            raise ArchiveError(
                f"{where} is Parquet inside an archive; unpack it and give the folder"
            )
        try:
            parquet = pq.ParquetFile(file, pre_buffer=False)
            known = parquet.schema_arrow.names
            if lacking := [name for name in columns if name not in known]:
                raise ArchiveError(f"{where} has no column {lacking[0]!r}; it has {known}")
            _check_sizes(where, parquet, columns)
            allowed = FREE_BYTES + LARGEST_EXPANSION * _uncompressed_bytes(parquet)
            # one row at a time: 64 references to a long text in a dictionary become 64 long texts
            for batch in parquet.iter_batches(1, columns=columns, use_threads=False):
                allowed -= batch.nbytes
                if allowed < 0:
                    raise ArchiveError(
                        f"{where} has far more text than its size: a long text is"
                        " repeated; write it without a dictionary, or use the original files"
                    )
                yield from batch.to_pylist()
        except ArchiveError:
            raise
        except UnicodeDecodeError:
            raise ArchiveError(f"{where} is not UTF-8") from None
        except (pa.ArrowException, OSError, ValueError, OverflowError) as error:  # a date, say
            reason = " ".join(str(error).split())
            raise ArchiveError(f"{where} is damaged: {reason[:200]}") from None


def _uncompressed_bytes(parquet: pq.ParquetFile) -> int:
    """Return the size of all row groups before compression."""
    groups = range(parquet.num_row_groups)
    return sum(parquet.metadata.row_group(group).total_byte_size for group in groups)


def _check_sizes(where: str, parquet: pq.ParquetFile, columns: list[str]) -> None:
    """Refuse lists and large columns before reading them: a few bytes may decode to many."""
    leaves = [parquet.schema.column(place) for place in range(len(parquet.schema))]
    for place, leaf in enumerate(leaves):
        name = leaf.path.partition(".")[0]
        if name not in columns:
            continue
        if leaf.max_repetition_level > 0:
            raise ArchiveError(f"{where} has lists in its column {name!r}")
        for group in range(parquet.num_row_groups):
            size = parquet.metadata.row_group(group).column(place).total_uncompressed_size
            if size > LARGEST_CHUNK:
                much = f"{size} bytes in its column {name!r}, row group {group}"
                raise ArchiveError(f"{where} has {much}; at most {LARGEST_CHUNK} were expected")
