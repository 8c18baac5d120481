"""Check the columns of shards before and after a row group is decoded.

A few bytes of Parquet may decode to gigabytes: pages of one repeated value, texts that refer to a
dictionary. The sizes in the footer may be forged, so the headers of the pages are read as well.
"""

import mmap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

MAX_BYTES = 2**28  # of a column of a row group
MAX_VALUES = 2**25  # of a column of a row group, list elements included
_WRITER = "parquet-cpp"  # Arrow reads pages of older writers beyond their stated size


class Column(NamedTuple):
    """The valid types, values and lengths of a column."""

    kinds: tuple[str, ...] = ()
    below: int | None = None  # every value must be less
    least: int = 0  # a sample has `least` to `most` values
    most: int | None = None
    like: str | None = None  # a column whose lists have the same lengths


def columns_of(task: str, parameters: Mapping[str, Any]) -> dict[str, Column]:
    """Return the columns of a task's data set with these parameters; {} for an unknown task.

    A missing or invalid parameter that bounds the size of samples raises ValueError.
    """

    def size(name: str) -> int:
        value = parameters.get(name)
        if type(value) is not int or not 1 <= value < 2**31:
            must = f"its parameter {name} must be a whole number of at least 1"
            raise ValueError(f"{must}, not {value!r:.40}")
        return value

    digit, bit = Column(("uint8",), below=10), Column(("uint8",), below=2)
    if task in ("listops", "listops-subtrees"):
        most = size("max_length")
        return {
            "tokens": Column(("binary",), below=16, least=1, most=most),
            "values": Column(("list of uint8",), below=10, like="positions"),
            "positions": Column(("list of uint16",), below=most),
            "label": digit,
        }
    if task in ("pathfinder", "path-x", "pathfinder-segmentation"):
        image = Column(("binary",), least=size("resolution") ** 2, most=size("resolution") ** 2)
        return {"image": image, "mask": image._replace(below=3), "label": bit}
    if task in ("text", "retrieval"):
        text = Column(("binary",), most=size("length"))
        return {"tokens": text, "tokens1": text, "tokens2": text, "label": bit}
    if task == "speech-commands":
        return {"samples": Column(("list of int16",), most=16_000), "label": digit}
    if task == "pg19":
        kinds, length = ("list of uint16", "list of uint32"), size("length") + 1
        return {"tokens": Column(kinds, below=size("vocabulary"), least=length, most=length)}
    return {}


def check_file(
    file: pq.ParquetFile, rows: int, group_rows: int, columns: Mapping[str, Column]
) -> int:
    """Return the samples of a row group; raise ArrowInvalid if the file is not a valid shard.

    It must have `rows` samples in groups of `group_rows` (0: the size of the first group), fewer in
    the last group.
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
        kind, valid = _kind(field.type), columns.get(field.name, Column()).kinds
        if kind is None or (valid and kind not in valid):
            expected = " or ".join(valid) or "numbers, text, bytes or lists of numbers"
            found = f"its column {field.name[:40]!r} is {str(field.type)[:60]}"
            raise pa.ArrowInvalid(f"{found}; {expected} was expected")
    return int(size)


def _kind(kind: pa.DataType) -> str | None:
    """Return the name of a type, without that of a list's elements; None for unexpected types."""
    types = pa.types
    if types.is_list(kind):
        inside = kind.value_type
        numeric = types.is_integer(inside) or types.is_floating(inside)
        return f"list of {inside}" if numeric else None
    is_bytes = types.is_string(kind) or types.is_binary(kind) or types.is_fixed_size_binary(kind)
    return str(kind) if is_bytes or types.is_primitive(kind) else None


def read_group(
    file: pq.ParquetFile,
    path: Path,
    group: int,
    names: Sequence[str] | None,
    columns: Mapping[str, Column],
) -> pa.Table:
    """Return some or all columns of a row group; raise ArrowInvalid for invalid samples."""
    rows = file.metadata.row_group(group).num_rows
    at_once = max(1, MAX_BYTES // max(1, _largest_chunk(file, path, group, names)))
    how = {"columns": names, "use_threads": False}
    if at_once >= rows:
        table = file.read_row_group(group, **how)
    else:
        batches, size = [], 0
        for batch in file.iter_batches(-(-at_once // 16), row_groups=[group], **how):
            batches.append(batch)
            size += batch.nbytes
            if size > MAX_BYTES:
                raise pa.ArrowInvalid(f"row group {group} has more than {MAX_BYTES} bytes")
        table = pa.Table.from_batches(batches)
    for name in table.column_names:
        _check_column(name, table, columns.get(name, Column()))
    return table


def _largest_chunk(
    file: pq.ParquetFile, path: Path, group: int, names: Sequence[str] | None
) -> int:
    """Return the bytes of the largest column before compression, which bound those of a cell."""
    largest, footer = 0, file.metadata.row_group(group)
    with open(path, "rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for place in range(footer.num_columns):
            column = footer.column(place)
            name = column.path_in_schema.partition(".")[0]
            if names is not None and name not in names:
                continue
            start = column.data_page_offset
            if column.has_dictionary_page and 0 < column.dictionary_page_offset < start:
                start = column.dictionary_page_offset
            size = page_sizes(data, start, start + column.total_compressed_size)
            width = file.schema.column(place).length  # 0 or less unless values have a fixed size
            if max(size.raw, size.values * max(0, width)) > MAX_BYTES or size.values > MAX_VALUES:
                much = f"{size.values} values and {size.raw} bytes, more than a data set may have"
                raise pa.ArrowInvalid(f"row group {group}, column {name[:40]!r}, has {much}")
            largest = max(largest, size.raw)
    return largest


def _check_column(name: str, table: pa.Table, column: Column) -> None:
    """Refuse empty cells, and values and lengths that are invalid for the task."""
    for place, chunk in enumerate(table[name].chunks):
        values, lengths = chunk, None
        if pa.types.is_list(chunk.type):
            values, lengths = chunk.flatten(), pc.list_value_length(chunk)
        elif pa.types.is_binary(chunk.type):
            lengths = pc.binary_length(chunk)
        else:
            chunk.validate(full=True)  # UTF-8
        if chunk.null_count or values.null_count:
            raise pa.ArrowInvalid(f"its column {name[:40]!r} has empty cells")
        if lengths is not None and column.most is not None:
            shortest, longest = pc.min_max(lengths).values()
            if shortest.as_py() < column.least or longest.as_py() > column.most:
                sizes = f"{shortest} to {longest} values a sample in its column {name!r}"
                limits = f"{column.least} to {column.most} were expected"
                raise pa.ArrowInvalid(f"it has {sizes}; {limits}")
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
    """Return the largest number, or byte of any cell; -1 if there is none."""
    if not pa.types.is_binary(values.type):
        most = pc.max(values).as_py()
        return -1 if most is None else int(most)
    _, offsets, content = values.buffers()
    ends = np.frombuffer(offsets, np.int32)[values.offset : values.offset + len(values) + 1]
    if content is None or not len(ends):
        return -1
    return int(np.frombuffer(content, np.uint8)[ends[0] : ends[-1]].max(initial=0))


# ---------------------------------------------------------------------------------- pages


class PageSizes(NamedTuple):
    """The size of a column of a row group according to the headers of its pages."""

    raw: int  # bytes before compression
    values: int


def page_sizes(data: mmap.mmap | bytes, place: int, stop: int) -> PageSizes:
    """Return the sum of the pages from `place` to `stop` (Thrift's compact PageHeader)."""
    raw = values = 0
    if not 4 <= place <= stop <= len(data):
        raise pa.ArrowInvalid("a column lies outside the file")
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
    return PageSizes(raw, values)


def _varint(data: mmap.mmap | bytes, place: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[place]
        place += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, place
    raise ValueError


def _struct(data: mmap.mmap | bytes, place: int, depth: int) -> tuple[dict[int, Any], int]:
    """Return the fields of a struct by number, and the position after it."""
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


def _value(data: mmap.mmap | bytes, place: int, kind: int, depth: int) -> tuple[Any, int]:
    """Return a value of a Thrift type that page headers have, and the position after it."""
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
