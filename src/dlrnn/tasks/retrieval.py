"""LRA Retrieval: whether one paper cites another, from the bytes of both (AAN pairs).

Its files are `new_aan_pairs.{train,eval,test}.tsv` of the LRA release, without a header: label (0
or 1), id1, id2, text1 and text2 between tabs, quoted as by Python's csv. Texts are not changed,
even if they were written as Python's `b'...'`.
"""

import csv
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import pyarrow as pa  # type: ignore[import-untyped]
import torch

from dlrnn.tasks.base import Batch
from dlrnn.tasks.storage.archives import Entry
from dlrnn.tasks.storage.layouts import split_files, text_lines
from dlrnn.tasks.storage.sets import labels_of
from dlrnn.tasks.storage.specs import ImportedSet, Row, Sample, schema_of
from dlrnn.tasks.text import ByteTask, padded, page_figure, text_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PAIRS = re.compile(r"(?:.*/)?new_aan_pairs\.(train|eval|test)\.tsv")
_SPLITS = {"train": "train", "eval": "validation", "test": "test"}
_COLUMNS = ["label", "id1", "id2", "text1", "text2"]
_LABELS = {"0": 0, "1": 1, "0.0": 0, "1.0": 1}
MAX_LINE = 2**24
"""Bytes of a line, and characters of a field."""


def retrieval_set(length: int = 4000) -> ImportedSet:
    """Return the data set of pairs of papers, each text cut to `length` bytes."""
    return ImportedSet(
        name=Retrieval.name,
        parameters={"length": length},
        rows=partial(_pairs, length=length),
        schema=schema_of(
            **dict.fromkeys(("tokens1", "tokens2"), pa.binary()),
            **{"label": pa.uint8(), "id1": pa.string(), "id2": pa.string()},
        ),
        layout="new_aan_pairs.{train,eval,test}.tsv",
        shard_rows=2**13,
        writer={"use_dictionary": ["label"]},
    )


def _pairs(path: Path, length: int) -> Iterator[Row]:
    for split, entry in split_files(path, _PAIRS, _SPLITS):
        for pair in _rows(entry, length):
            yield split, pair


def _rows(entry: Entry, length: int) -> Iterator[Sample]:
    csv.field_size_limit(max(csv.field_size_limit(), MAX_LINE))
    with entry.open() as file:
        lines = text_lines(entry.where, file, MAX_LINE)
        reader = csv.reader(lines, delimiter="\t", strict=True)
        while True:
            where = f"{entry.where} line {reader.line_num + 1}"
            try:
                row = next(reader, None)
            except csv.Error as error:
                raise ValueError(f"{where} is damaged: {error}") from None
            if row is None:
                return
            if len(row) != len(_COLUMNS):
                expected = f"expected {len(_COLUMNS)}: {', '.join(_COLUMNS)}"
                raise ValueError(f"{where} has {len(row)} columns; {expected}")
            label, id1, id2, text1, text2 = row
            if label not in _LABELS:
                raise ValueError(f"{where} has the label {label[:40]!r}; expected 0 or 1")
            first, second = text1.encode()[:length], text2.encode()[:length]
            names = {"label": _LABELS[label], "id1": id1, "id2": id2}
            yield {"tokens1": first, "tokens2": second, **names}


@dataclass(frozen=True)
class Retrieval(ByteTask):
    """The input is the bytes of two papers (AAN), which the model reads separately. The output is 1
    if one paper cites the other, else 0.

    Inputs are [B, 2, L], lengths [B, 2].
    """

    length: int = 4000

    name: ClassVar[str] = "retrieval"
    probes: ClassVar[str] = "comparing two texts through one vector each"
    columns: ClassVar[tuple[str, ...]] = ("tokens1", "tokens2", "label")
    pair: ClassVar[bool] = True
    """A model reads both texts with the same weights and gives one answer."""

    def spec(self) -> ImportedSet:
        """The data set of pairs, each text cut to `length` bytes."""
        return retrieval_set(self.length)

    def _batch(self, samples: Sequence[Sample]) -> Batch:
        first, second = (
            padded([sample[name] for sample in samples], self.length)
            for name in ("tokens1", "tokens2")
        )
        tokens, lengths = (torch.stack(both, dim=1) for both in zip(first, second, strict=True))
        return Batch(tokens, labels_of(samples), lengths)

    def preview(self, *, split: str = "train", step: int = 0) -> "Figure":
        """Draw the beginnings of both papers."""
        batch = self.sample(1, split=split, step=step)
        cites = "1, one cites the other" if batch.targets[0] else "0, neither cites the other"
        titles = (f"target: {cites}; first paper", "second paper")
        texts = map(text_of, batch.inputs[0])
        return self.captioned(page_figure(list(zip(titles, texts, strict=True))))
