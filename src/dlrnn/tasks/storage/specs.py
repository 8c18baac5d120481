"""What a data set consists of: generated samples, or samples that are read from a release."""

import io
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from dlrnn.tasks.random import SPLITS
from dlrnn.tasks.storage.shards import listed

Sample = Mapping[str, Any]
"""The values of a sample by the names of its columns."""
Row = tuple[str, Sample]
"""A split and a sample of it."""


@dataclass(frozen=True, kw_only=True)
class GeneratedSet(ABC):
    """The content of a generated data set. Worker processes get a pickled copy of it."""

    name: str
    seed: int = 0
    counts: Mapping[str, int]
    """The number of samples of each split."""
    shard_rows: int
    """Samples of a shard."""

    unique: ClassVar[str | None] = None
    """A column without duplicates; if there is one, a column `attempt` must exist."""
    writer: ClassVar[Mapping[str, Any]] = {}
    """Options of `pyarrow.parquet.write_table` that encode the columns."""

    @property
    @abstractmethod
    def parameters(self) -> dict[str, Any]:
        """The other settings that determine the samples, as JSON values."""

    @property
    @abstractmethod
    def group_rows(self) -> int:
        """Samples of a row group, which is read at once."""

    @property
    @abstractmethod
    def bytes_per_sample(self) -> int:
        """An upper estimate of the size on disk."""

    @property
    @abstractmethod
    def schema(self) -> pa.Schema:
        """The columns."""

    @abstractmethod
    def sample(self, split: str, index: int, attempt: int = 0) -> Sample:
        """Return a sample: that of the first valid attempt from `attempt` on."""

    def stream(self, split: str, index: int) -> tuple[np.uint64, np.uint64, np.uint64]:
        """Return the seed, the split and the index of a sample for a numba kernel."""
        if split not in SPLITS[:3]:
            raise ValueError(f"split must be train, validation or test, not {split!r}")
        return np.uint64(self.seed % 2**64), np.uint64(SPLITS.index(split)), np.uint64(index)

    def table(self, split: str, rows: range, attempts: Mapping[int, int]) -> pa.Table:
        """Return samples of a split, from their given attempts or from attempt 0."""
        samples = [self.sample(split, index, attempts.get(index, 0)) for index in rows]
        return table_of(samples, self.schema)


@dataclass(frozen=True)
class ImportedSet:
    """A data set whose samples are read from files."""

    name: str
    parameters: Mapping[str, Any]
    rows: Callable[[Path], Iterator[Row]]
    """Yields splits and samples of the files at a path; it may return a remark for the user."""
    schema: pa.Schema
    layout: str
    """The expected files, for error messages."""
    shard_rows: int
    group_rows: int = 64
    splits: tuple[str, ...] = SPLITS[:3]
    """Splits that must not be empty."""
    order: Callable[[Sample], Any] | None = None
    """The sort key of samples within a shard; None keeps the order of the files."""
    writer: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: bytes | None = None
    """The tokenizer.json of the samples, which is stored with them."""


def schema_of(**types: pa.DataType) -> pa.Schema:
    """Return a schema of columns without empty cells; bytes are arrays of uint8."""
    bytes_ = {"dtype": "uint8"}
    return pa.schema(
        pa.field(name, kind, False, bytes_ if kind == pa.binary() else None)
        for name, kind in types.items()
    )


def list_of(kind: pa.DataType) -> pa.DataType:
    """Return the type of a list without empty elements."""
    return pa.list_(pa.field("element", kind, False))


def table_of(samples: Sequence[Sample], schema: pa.Schema) -> pa.Table:
    """Return samples as a table; a column of bytes may have arrays."""
    columns = []
    for name, kind in zip(schema.names, schema.types, strict=True):
        cells = [sample[name] for sample in samples]
        if pa.types.is_binary(kind):
            cells = [cell if isinstance(cell, bytes) else cell.tobytes() for cell in cells]
        columns.append(pa.array(cells, kind))
    return pa.Table.from_arrays(columns, schema=schema)


def encoded(table: pa.Table, group_rows: int, writer: Mapping[str, Any]) -> bytes:
    """Return the bytes of a shard."""
    file = io.BytesIO()
    pq.write_table(table, file, row_group_size=group_rows, compression="zstd", **writer)
    return file.getvalue()


def scaled_counts(counts: Mapping[str, int], samples: int) -> dict[str, int]:
    """Divide `samples` in the proportions of `counts`, with at least one for each split."""
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
