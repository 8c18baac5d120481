"""What a shard may hold: looked at before a row group is decoded, and after it.

A few bytes of Parquet may stand for gigabytes: pages that are all one value, texts that refer to a
dictionary. What the footer says of sizes may be wrong, so the headers of the pages are read, too.
"""

import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

MOST_GROUP = 2**28  # bytes of a column of a row group
MOST_VALUES = 2**25  # of a column of a row group, the elements of its lists
_WRITER = "parquet-cpp"  # of older writers Arrow reads some bytes more than they say


@dataclass(frozen=True)
class Column:
    """What the samples of a task have in a column."""

    kinds: tuple[str, ...]
    below: int | None = None
    """Every value is less."""
    least: int = 0
    most: int | None = None
    """Values of a sample."""
    like: str | None = None
    """A column that has as many."""


def columns_of(task: str, parameters: Mapping[str, Any]) -> dict[str, Column]:
    """Of one of our tasks, with the parameters of a set; {} of another."""
    label, many = Column(("uint8",), below=10), parameters.get
    if task in ("listops", "listops-subtrees"):
        most = many("max_length")
        return {
            "tokens": Column(("bytes",), below=16, least=1, most=most),
            "values": Column(("list of uint8",), below=10, like="positions"),
            "positions": Column(("list of uint16",), below=most),
            "label": label,
        }
    if task in ("pathfinder", "path-x", "pathfinder-segmentation"):
        pixels = int(parameters["resolution"]) ** 2
        image = Column(("bytes",), least=pixels, most=pixels)
        mask = Column(("bytes",), below=3, least=pixels, most=pixels)
        return {"image": image, "mask": mask, "label": Column(("uint8",), below=2)}
    if task in ("text", "retrieval"):
        text, label = Column(("bytes",), most=many("length")), Column(("uint8",), below=2)
        return {"tokens": text, "tokens1": text, "tokens2": text, "label": label}
    if task == "speech-commands":
        return {"samples": Column(("list of int16",), most=16_000), "label": label}
    if task == "pg19":
        kinds, size = ("list of uint16", "list of uint32"), int(parameters["length"]) + 1
        return {"tokens": Column(kinds, below=many("vocabulary"), least=size, most=size)}
    return {}


def check_file(
    file: pq.ParquetFile, rows: int, group_rows: int, columns: Mapping[str, Column]
) -> int:
    """Samples of its first row group; ArrowInvalid if its form is not that of a shard.

    It has so many rows in groups of `group_rows` (0: as its first), fewer in the last.
    """
    metadata = file.metadata
    if not (metadata.created_by or "").startswith(_WRITER):
        raise pa.ArrowInvalid("it was not written by pyarrow")
    sizes = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
    if metadata.num_rows != rows or sum(sizes) != rows:
        raise pa.ArrowInvalid(f"it holds {metadata.num_rows} samples, not {rows}")
    size = group_rows or (sizes[0] if sizes else 0)
    if size < 1 or sizes != [min(size, rows - first) for first in range(0, rows, size)]:
        raise pa.ArrowInvalid(f"its row groups are not of {size} samples")
    for field in file.schema_arrow:
        kind = _kind(field.type)
        wanted = columns[field.name].kinds if field.name in columns else None
        if kind is None or (wanted is not None and kind not in wanted):
            expected = " or ".join(wanted or ("numbers, text, bytes or lists of numbers",))
            found = f"its column {field.name[:40]!r} is {str(field.type)[:60]}"
            raise pa.ArrowInvalid(f"{found}; {expected} was expected")
    return int(sizes[0])


def _kind(kind: pa.DataType) -> str | None:
    """In a word, the same for types that are read alike; None if a set never has it."""
    types = pa.types
    if types.is_binary(kind) or types.is_large_binary(kind):
        return "bytes"
    if types.is_list(kind) or types.is_large_list(kind):
        inside = kind.value_type
        numeric = types.is_integer(inside) or types.is_floating(inside)
        return f"list of {inside}" if numeric else None
    flat = types.is_primitive(kind) or types.is_string(kind) or types.is_large_string(kind)
    return str(kind) if flat or types.is_fixed_size_binary(kind) else None


def read_group(
    file: pq.ParquetFile,
    path: Path,
    group: int,
    names: Sequence[str] | None,
    columns: Mapping[str, Column],
) -> pa.Table:
    """A row group, all columns or those of these names; ArrowInvalid if a sample cannot be."""
    rows = file.metadata.row_group(group).num_rows
    at_once = max(1, MOST_GROUP // max(1, _largest_chunk(file, path, group, names)))
    how = {"columns": names, "use_threads": False}
    if at_once >= rows:
        table = file.read_row_group(group, **how)
    else:
        batches, size = [], 0
        for batch in file.iter_batches(-(-at_once // 16), row_groups=[group], **how):
            batches.append(batch)
            size += batch.nbytes
            if size > MOST_GROUP:
                raise pa.ArrowInvalid(f"row group {group} has more than {MOST_GROUP} bytes")
        table = pa.Table.from_batches(batches)
    for name in table.column_names:
        _check_column(name, table, columns.get(name, _ANY))
    return table


_ANY = Column(())


def _largest_chunk(
    file: pq.ParquetFile, path: Path, group: int, names: Sequence[str] | None
) -> int:
    """Bytes of the largest column before compression: no cell has more."""
    found, told = 0, file.metadata.row_group(group)
    with open(path, "rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for place in range(told.num_columns):
            column = told.column(place)
            name = column.path_in_schema.partition(".")[0]
            if names is not None and name not in names:
                continue
            start = column.data_page_offset
            if column.has_dictionary_page and 0 < column.dictionary_page_offset < start:
                start = column.dictionary_page_offset
            size = _pages(data, start, start + column.total_compressed_size)
            width = file.schema.column(place).length  # of a fixed size, else 0 or less
            if max(size.raw, size.values * max(0, width)) > MOST_GROUP or size.values > MOST_VALUES:
                many = f"{size.values} values and {size.raw} bytes in its column {name[:40]!r}"
                raise pa.ArrowInvalid(f"row group {group} has {many}, which no set has")
            found = max(found, size.raw)
    return found


def _check_column(name: str, table: pa.Table, column: Column) -> None:
    """Refuse empty cells, and values and lengths that the task does not have."""
    for place, chunk in enumerate(table[name].chunks):
        kind, values, lengths = chunk.type, chunk, None
        if pa.types.is_list(kind) or pa.types.is_large_list(kind):
            values, lengths = chunk.flatten(), pc.list_value_length(chunk)
        elif pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
            lengths = pc.binary_length(chunk)
        elif pa.types.is_string(kind) or pa.types.is_large_string(kind):
            chunk.validate(full=True)  # UTF-8
        if chunk.null_count or values.null_count:
            raise pa.ArrowInvalid(f"its column {name[:40]!r} has empty cells")
        if lengths is not None and (column.least or column.most is not None):
            shortest, longest = pc.min_max(lengths).values()
            most = column.most if column.most is not None else longest.as_py()
            if shortest.as_py() < column.least or longest.as_py() > most:
                sizes = f"{shortest} to {longest} values a sample in its column {name!r}"
                raise pa.ArrowInvalid(f"it has {sizes}; {column.least} to {most} were expected")
        if column.below is not None and (most := _highest(values)) >= column.below:
            above = f"the value {most} in its column {name!r}"
            raise pa.ArrowInvalid(f"it has {above}; all must be below {column.below}")
        if (
            lengths is not None
            and column.like in table.column_names
            and not lengths.equals(pc.list_value_length(table[column.like].chunk(place)))
        ):
            raise pa.ArrowInvalid(f"its columns {name!r} and {column.like!r} differ in length")


def _highest(values: pa.Array) -> int:
    """Of numbers, or of the bytes of all cells; -1 without any."""
    if not (pa.types.is_binary(values.type) or pa.types.is_large_binary(values.type)):
        most = pc.max(values).as_py()
        return -1 if most is None else int(most)
    _, offsets, content = values.buffers()
    kind = np.int64 if pa.types.is_large_binary(values.type) else np.int32
    ends = np.frombuffer(offsets, kind)[values.offset : values.offset + len(values) + 1]
    if content is None or not len(ends):
        return -1
    return int(np.frombuffer(content, np.uint8)[ends[0] : ends[-1]].max(initial=0))


# ---------------------------------------------------------------------------------- pages


class _Size(NamedTuple):
    """Of a column of a row group, as the headers of its pages say."""

    raw: int  # bytes before compression
    values: int


def _pages(data: mmap.mmap, place: int, stop: int) -> _Size:
    """What the pages from `place` to `stop` hold (Thrift's compact protocol, PageHeader)."""
    raw = values = 0
    if not 4 <= place <= stop <= len(data):
        raise pa.ArrowInvalid("a column lies outside of it")
    try:
        while place < stop:
            header, place = _struct(data, place, 0)
            kind, decoded, stored = header[1], header[2], header[3]
            page = {0: header.get(5), 2: header.get(7), 3: header.get(8)}.get(kind)
            if min(decoded, stored) < 0 or page is None or page[1] < 0:
                raise ValueError
            raw, values, place = raw + decoded, values + page[1], place + stored
    except (ValueError, KeyError, IndexError, TypeError):
        raise pa.ArrowInvalid("the header of a page is damaged") from None
    return _Size(raw, values)


def _varint(data: mmap.mmap, place: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[place]
        place += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, place
    raise ValueError


def _struct(data: mmap.mmap, place: int, depth: int) -> tuple[dict[int, Any], int]:
    """Its fields by number, and the place behind it."""
    fields: dict[int, Any] = {}
    number = 0
    while byte := data[place]:
        place += 1
        if byte >> 4:
            number += byte >> 4
        else:
            coded, place = _varint(data, place)
            number = coded >> 1 ^ -(coded & 1)
        fields[number], place = _value(data, place, byte & 15, depth + 1)
    return fields, place + 1


def _value(data: mmap.mmap, place: int, kind: int, depth: int) -> tuple[Any, int]:
    """A value of a Thrift type, as far as headers of pages have them."""
    if kind in (1, 2):  # true, false
        return kind == 1, place
    if kind in (4, 5, 6):  # whole numbers
        coded, place = _varint(data, place)
        return coded >> 1 ^ -(coded & 1), place
    if kind == 8:  # bytes
        size, place = _varint(data, place)
        return None, place + size
    if kind == 12 and depth < 8:
        return _struct(data, place, depth)
    raise ValueError
