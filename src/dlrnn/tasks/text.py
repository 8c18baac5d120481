"""LRA Text and Retrieval: tasks over the bytes of texts.

Text is whether a film review is positive (IMDb). The official test split is the test split. A
review of the official training split is held out for validation if the SHA-256 of its name is
divisible by 10: about a tenth of them, and the same ones for every kind of folder or archive. (The
test split has other films; validation shares films with training and is a little easier.) Reviews
in the Hub's Parquet files have no names; their positions replace the names, so other reviews are
held out.

Retrieval is whether one paper cites another (AAN pairs). Its files are
`new_aan_pairs.{train,eval,test}.tsv` of the LRA release, without a header: label (0 or 1), id1,
id2, text1 and text2 between tabs, quoted as by Python's csv. Texts are not changed, even if they
were written as Python's `b'...'`.
"""

import codecs
import csv
import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import torch
from jaxtyping import Int64
from torch import Tensor

from dlrnn.common.figures import new_figure
from dlrnn.tasks.base import Batch, ClassificationTask
from dlrnn.tasks.storage import shards
from dlrnn.tasks.storage.archives import (
    Entry,
    entries,
    hub_split,
    parquet_rows,
    split_files,
    text_lines,
)
from dlrnn.tasks.storage.sets import SetTask, labels_of
from dlrnn.tasks.storage.specs import ImportedSet, Row, Sample, schema_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_REVIEW = re.compile(r"(?:.*/)?(train|test)/([^/]+)/([^/.][^/]*)\.txt")
_LABELS = {"neg": 0, "pos": 1}
_UNLABELLED = "unsup"  # a folder of the official archive that is not used
_PIECE = 2**16

_PAIRS = re.compile(r"(?:.*/)?new_aan_pairs\.(train|eval|test)\.tsv")
_PAIR_SPLITS = {"train": "train", "eval": "validation", "test": "test"}
_PAIR_COLUMNS = ["label", "id1", "id2", "text1", "text2"]
_PAIR_LABELS = {"0": 0, "1": 1, "0.0": 0, "1.0": 1}
MAX_LINE = 2**24
"""Bytes of a line, and characters of a field."""


def text_set(length: int = 2048) -> ImportedSet:
    """Return the data set of reviews, cut to `length` bytes."""
    return ImportedSet(
        name=Text.name,
        parameters={"length": length},
        rows=partial(_reviews, length=length),
        schema=schema_of(tokens=pa.binary(), label=pa.uint8(), review=pa.string()),
        layout="aclImdb/{train,test}/{pos,neg}/ID_RATING.txt or {train,test}-*-of-*.parquet",
        splits=("train", "test"),
        shard_rows=2**15,
        order=lambda row: _digest(row["review"]),  # archives are sorted by class
        writer={"use_dictionary": ["label"]},
    )


def _reviews(path: Path, length: int) -> Iterator[Row]:
    seen: set[bytes] = set()
    for review, label, text in _found(path, length):
        digest = _digest(review)
        if digest in seen:
            raise ValueError(f"{path}: {review} occurs twice")
        seen.add(digest)
        split = review.partition("/")[0]
        if split == "train" and int.from_bytes(digest) % 10 == 0:
            split = "validation"
        yield split, {"tokens": text, "label": label, "review": review}


def _found(path: Path, length: int) -> Iterator[tuple[str, int, bytes]]:
    """Yield the name, the label and the text of each review."""
    seen: dict[bool, str] = {}  # a file that is Parquet, and one that is not
    for entry in entries(path):
        hub, found = hub_split(entry.name), _REVIEW.fullmatch(entry.name)
        if hub is None and (found is None or found[2] == _UNLABELLED):
            continue
        seen.setdefault(hub is not None, entry.name)
        if len(seen) == 2:
            raise ValueError(f"{path} holds {seen[True]} and {seen[False]}; keep one of the two")
        if hub is not None:
            yield from _rows(entry, hub, length)
        elif found is not None:
            split, label, stem = found.groups()
            if label not in _LABELS:
                raise ValueError(f"{entry.where} has the label {label!r}; expected neg or pos")
            if not re.fullmatch(r"\d+_\d+", stem, re.ASCII):
                raise ValueError(f"{entry.where} is not named ID_RATING.txt")
            yield f"{split}/{label}/{stem}", _LABELS[label], _text(entry, length)


def _rows(entry: Entry, split: str, length: int) -> Iterator[tuple[str, int, bytes]]:
    """Yield the reviews of a Parquet file of the Hub, named by their positions."""
    stem = PurePosixPath(entry.name).stem
    for number, (where, row) in enumerate(parquet_rows(entry, ["text", "label"])):
        text, label = row["text"], row["label"]
        if type(label) is not int or label not in (0, 1):
            raise ValueError(f"{where} has the label {label!r:.40}; expected 0 or 1")
        if not isinstance(text, str) or not text:
            raise ValueError(f"{where} has no text")
        yield f"{split}/{('neg', 'pos')[label]}/{stem}/{number}", label, text.encode()[:length]


def _digest(review: str) -> bytes:
    return hashlib.sha256(review.encode()).digest()


def _text(entry: Entry, length: int) -> bytes:
    """Return the first bytes of a text, after all of it was decoded."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    with entry.open() as file:
        try:
            piece = start = file.read(max(_PIECE, length))
            while piece:
                decoder.decode(piece)
                piece = file.read(_PIECE)
            decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            raise ValueError(f"{entry.where} is not UTF-8") from None
    if not start:
        raise ValueError(f"{entry.where} is empty")
    return start[:length]


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
    for split, entry in split_files(path, _PAIRS, _PAIR_SPLITS):
        for pair in _pair_rows(entry, length):
            yield split, pair


def _pair_rows(entry: Entry, length: int) -> Iterator[Sample]:
    csv.field_size_limit(max(csv.field_size_limit(), MAX_LINE))
    reader = csv.reader(text_lines(entry, MAX_LINE), delimiter="\t", strict=True)
    while True:
        where = f"{entry.where} line {reader.line_num + 1}"
        try:
            row = next(reader, None)
        except csv.Error as error:
            raise ValueError(f"{where} is damaged: {error}") from None
        if row is None:
            return
        if len(row) != len(_PAIR_COLUMNS):
            expected = f"expected {len(_PAIR_COLUMNS)}: {', '.join(_PAIR_COLUMNS)}"
            raise ValueError(f"{where} has {len(row)} columns; {expected}")
        label, id1, id2, text1, text2 = row
        if label not in _PAIR_LABELS:
            raise ValueError(f"{where} has the label {label[:40]!r}; expected 0 or 1")
        first, second = text1.encode()[:length], text2.encode()[:length]
        names = {"label": _PAIR_LABELS[label], "id1": id1, "id2": id2}
        yield {"tokens1": first, "tokens2": second, **names}


# ---------------------------------------------------------------------------------- tasks


@dataclass(frozen=True)
class ByteTask(ClassificationTask, SetTask):
    """A text as bytes, and two classes. Token 0 is padding, byte b is token b + 1."""

    length: int = 0

    causal: ClassVar[bool] = False
    drawable: ClassVar[bool] = False
    vocabulary: ClassVar[int] = 257
    d_output: ClassVar[int] = 2
    limits: ClassVar = {"length": (1, 2**20)}

    @property
    def input_length(self) -> int:
        """The length, to which longer texts are cut."""
        return self.length

    def _split(self, split: str) -> shards.Split:
        stored = super()._split(split)
        if (kept := stored.manifest["parameters"]["length"]) < self.length:
            raise ValueError(f"{self.folder} has texts cut to length {kept}, not to {self.length}")
        return stored


@dataclass(frozen=True)
class Text(ByteTask):
    """The input is the bytes of a film review (IMDb). The output is 1 if the review is positive,
    else 0.

    `This film is a gem ...` is 1.
    """

    length: int = 2048

    name: ClassVar[str] = "text"
    probes: ClassVar[str] = "reading, byte by byte"
    columns: ClassVar[tuple[str, ...]] = ("tokens", "label")

    def spec(self) -> ImportedSet:
        """The data set of reviews, cut to `length` bytes."""
        return text_set(self.length)

    def _batch(self, samples: Sequence[Sample]) -> Batch:
        tokens, lengths = padded([sample["tokens"] for sample in samples], self.length)
        return Batch(tokens, labels_of(samples), lengths)

    def preview(self, *, split: str = "train", step: int = 0) -> "Figure":
        """Draw the beginning of a review."""
        batch = self.sample(1, split=split, step=step)
        label = "1, positive" if batch.targets[0] else "0, negative"
        return self.captioned(page_figure([(f"target: {label}", text_of(batch.inputs[0]))]))


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


def padded(
    texts: Sequence[np.ndarray], length: int
) -> tuple[Int64[Tensor, "B L"], Int64[Tensor, " B"]]:
    """Return tokens, padded with 0, and their numbers; an empty text is one token of padding."""
    tokens = np.zeros((len(texts), length), dtype=np.int64)
    for row, text in zip(tokens, texts, strict=True):
        cut = text[:length]
        row[: len(cut)] = cut.astype(np.int64) + 1
    lengths = [min(max(len(text), 1), length) for text in texts]
    return torch.from_numpy(tokens), torch.tensor(lengths)


def text_of(tokens: Int64[Tensor, " L"]) -> str:
    """Return the beginning of a text of bytes, for a picture."""
    return bytes((tokens[tokens > 0][:1200] - 1).tolist()).decode("ascii", "replace")


def page_figure(titled: Sequence[tuple[str, str]]) -> "Figure":
    """Draw the first 1200 characters of each text, with a title above."""
    figure = new_figure(11, 5 * len(titled))
    for axes, (title, text) in zip(
        figure.subplots(len(titled), squeeze=False)[:, 0], titled, strict=True
    ):
        start = text[:1200]
        ascii_ = "".join(sign if sign.isprintable() and sign.isascii() else " " for sign in start)
        lines = "\n".join(ascii_[place : place + 100] for place in range(0, len(ascii_), 100))
        axes.text(0, 1, lines, va="top", family="monospace", parse_math=False)
        axes.set_title(title)
        axes.set_axis_off()
    return figure
