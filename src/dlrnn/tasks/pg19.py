"""PG-19: books as one long stream of tokens, cut into sequences for a language model.

Books are in the folders `train`, `validation` and `test`, at any depth, or in Parquet files whose
names begin with these words, as in the official release. Otherwise the SHA-256 of a book's file
name decides: one in ten for validation, one in ten for test. A split is the concatenation of its
books, each followed by the end token. Text is tokenized in pieces of PIECE characters that end
before a space, so that memory use is constant.
"""

import base64
import hashlib
import io
import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import torch
from jaxtyping import Float, Int
from torch import Tensor

from dlrnn.common.untrusted import brief
from dlrnn.tasks.base import Batch, element_count
from dlrnn.tasks.storage import shards
from dlrnn.tasks.storage.archives import Entry, entries, parquet_rows
from dlrnn.tasks.storage.sets import SetTask
from dlrnn.tasks.storage.specs import ImportedSet, Row, Sample
from dlrnn.tasks.text import page_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from tokenizers import Tokenizer

PIECE = 2**16
"""Characters that one thread tokenizes at once."""
PIECES = 16
"""Pieces that the tokenizer's threads share."""
_SPLITS = ("train", "validation", "test")
_PARQUET = re.compile(r"(train|validation|test)(?:-.*)?\.parquet")
_END_TOKENS = ("</s>", "<|endoftext|>", "<eos>", "[SEP]")
_MAX_TOKENIZER_BYTES = 2**27
MAX_GROWTH = 2**10
"""The factor by which the replacements of a tokenizer may lengthen a text."""
_T5_VOCABULARY = 32100

# ---------------------------------------------------------------------------------- tokenizers


def read_tokenizer(path: Path) -> bytes:
    """Return the content of a tokenizer.json, which may be compressed."""
    for entry in entries(path) if path.is_file() else ():
        return entry.read(_MAX_TOKENIZER_BYTES)
    raise ValueError(f"there is no file {path}; a tokenizer.json was expected")


def make_tokenizer(content: bytes, where: str | Path) -> "Tokenizer":
    """Return the tokenizer of a tokenizer.json; errors begin with `where`."""
    from tokenizers import Tokenizer

    with tokenizer_errors(where):
        tokenizer = Tokenizer.from_str(content.decode())
    _check_growth(content, where)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


@contextmanager
def tokenizer_errors(where: str | Path) -> Iterator[None]:
    """Turn any error of the tokenizers package, also a panic of Rust, into a ValueError."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise ValueError(f"{where} is not a usable tokenizer.json: {brief(error)}") from None


def _check_growth(content: bytes, where: str | Path) -> None:
    """Refuse replacements that together make a text more than MAX_GROWTH times as long."""
    settings = json.loads(content)
    parts, growth = [settings.get(key) for key in ("normalizer", "pre_tokenizer", "decoder")], 1
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            parts.extend(part.values())
            growth *= _growth(part)
        elif isinstance(part, list):
            parts.extend(part)
    if growth > MAX_GROWTH:
        raise ValueError(
            f"{where} has replacements that make a text up to {growth:.0e} times as long;"
            f" at most {MAX_GROWTH} is accepted"
        )


def _growth(part: Mapping[str, Any]) -> int:
    """Return the factor by which one part of a tokenizer can lengthen a text."""
    if part.get("type") == "ByteLevel":
        return 2  # a byte becomes a character, which may have two bytes
    if isinstance(charsmap := part.get("precompiled_charsmap"), str):
        content = base64.b64decode(charsmap)  # size of a trie, the trie, texts that end in NUL
        texts = content[4 + int.from_bytes(content[:4], "little") :].split(b"\0")
        return max(1, *map(len, texts))
    if isinstance(prepended := part.get("prepend"), str):
        return 1 + len(prepended)
    if not isinstance(replacement := part.get("content"), str):
        return 1
    is_regex = isinstance(part.get("pattern"), dict) and "Regex" in part["pattern"]
    return max(1, len(replacement) + is_regex)  # an expression may match the empty text


def vocabulary_of(tokenizer: "Tokenizer") -> int:
    """Return the largest token and one more: there may be gaps."""
    return max(tokenizer.get_vocab().values(), default=0) + 1


def end_token(tokenizer: "Tokenizer", where: str | Path) -> int:
    """Return the token that follows a book."""
    found = (tokenizer.token_to_id(name) for name in _END_TOKENS)
    end = next((token for token in found if token is not None), None)
    if end is None:
        raise ValueError(f"{where} has no end token; expected one of {', '.join(_END_TOKENS)}")
    return end


# ---------------------------------------------------------------------------------- data set


def books_set(tokenizer: Path | None = None, length: int = 4096) -> ImportedSet:
    """Return the data set: blocks of `length` + 1 tokens, which overlap in one token."""
    content = None if tokenizer is None else read_tokenizer(tokenizer)
    parameters: dict[str, Any] = {"length": length}
    if content is not None:
        tokens = vocabulary_of(make_tokenizer(content, str(tokenizer)))
        parameters |= {"vocabulary": tokens, "tokenizer": hashlib.sha256(content).hexdigest()}
    kind = pa.uint16() if parameters.get("vocabulary", _T5_VOCABULARY) <= 2**16 else pa.uint32()
    return ImportedSet(
        name=PG19.name,
        parameters=parameters,
        rows=lambda path: _blocks(path, content, length),
        schema=pa.schema([pa.field("tokens", pa.list_(pa.field("token", kind, False)), False)]),
        layout=f"a folder of books (.txt, or Parquet with a column text) with more than {length}"
        " tokens for each of train, validation and test (by folder, else by a hash of file names)",
        shard_rows=2**12,
        writer={"use_dictionary": False},
        tokenizer=content,
    )


def _blocks(path: Path, content: bytes | None, length: int) -> Iterator[Row]:
    """Yield blocks of all splits; incomplete last blocks are dropped."""
    if content is None:
        raise ValueError(f"{PG19.name} needs a tokenizer: use --tokenizer FILE, a tokenizer.json")
    tokenizer = make_tokenizer(content, "the tokenizer")
    end = end_token(tokenizer, "the tokenizer")
    streams: dict[str, Int[np.ndarray, " left"]] = {}  # tokens that are not yet yielded
    for split, text in read_books(path):
        left = streams.get(split, np.empty(0, dtype=np.uint32))
        for tokens in itertools.chain(_encoded(tokenizer, text), [[end]]):
            left = np.concatenate((left, np.array(tokens, dtype=np.uint32)))
            while len(left) > length:
                yield split, {"tokens": left[: length + 1]}
                left = left[length:]
        streams[split] = left


def _encoded(tokenizer: "Tokenizer", text: Iterable[str]) -> Iterator[list[int]]:
    """Yield the tokens of each piece of a text that is given in parts."""
    pieces = text_pieces(text)
    while some := list(itertools.islice(pieces, PIECES)):
        with tokenizer_errors("the tokenizer"):
            encoded = tokenizer.encode_batch_fast(some, add_special_tokens=False)
        for piece in encoded:
            yield piece.ids


def text_pieces(text: Iterable[str]) -> Iterator[str]:
    """Yield pieces of at most PIECE characters, cut before a space if possible.

    They depend on the whole text alone, not on the parts in which it is given.
    """
    left = ""
    for part in text:
        left += part
        while len(left) > PIECE:
            space = max(left.rfind(sign, 1, PIECE) for sign in (" ", "\n"))
            stop = space if space > 0 else PIECE
            yield left[:stop]
            left = left[stop:]
    if left:
        yield left


# ---------------------------------------------------------------------------------- books


def read_books(path: Path) -> Iterator[tuple[str, Iterator[str]]]:
    """Yield the split of each book, and its text in parts."""
    seen: dict[bool, str] = {}  # a file whose path names its split, and one whose does not
    for entry in entries(path):
        kind = Path(entry.name).suffix
        if kind not in (".txt", ".parquet") or Path(entry.name).name.startswith("."):
            continue
        split = _named_split(path, entry.name)
        seen.setdefault(split is not None, entry.name)
        if len(seen) == 2:
            both = f"{seen[True]} in a folder of a split and {seen[False]} in none"
            raise ValueError(f"{path} holds {both}; keep one of the two layouts")
        if kind == ".txt":
            yield split or hashed_split(Path(entry.name).name), _text(entry)
            continue
        for number, (where, row) in enumerate(parquet_rows(entry, ["text"])):
            name = f"{Path(entry.name).name}/{number}"
            text = "" if row["text"] is None else row["text"]
            if not isinstance(text, str):
                raise ValueError(f"{where} must be text, not {type(text).__name__}")
            yield split or hashed_split(name), iter([text])


def _named_split(path: Path, name: str) -> str | None:
    """Return the split in the name of a folder or of a Parquet file, if any."""
    *folders, file = PurePosixPath(name).parts
    named = {folder for folder in folders if folder in _SPLITS}
    if found := _PARQUET.fullmatch(file):
        named.add(found[1])
    if len(named) > 1:
        raise ValueError(f"{path}: {name} is in two splits, {' and '.join(sorted(named))}")
    return named.pop() if named else None


def hashed_split(name: str) -> str:
    """Return the split of a book whose path does not name one."""
    digit = int.from_bytes(hashlib.sha256(name.encode(errors="surrogateescape")).digest()) % 10
    return {0: "test", 1: "validation"}.get(digit, "train")


def _text(entry: Entry) -> Iterator[str]:
    """Yield the UTF-8 text of a file without its byte order mark; line ends become line feeds."""
    with entry.open() as file:
        lines = io.TextIOWrapper(file, encoding="utf-8-sig")
        try:
            while part := lines.read(PIECE):
                yield part
        except UnicodeDecodeError:
            raise ValueError(f"{entry.where} is not UTF-8") from None
        lines.detach()


# ---------------------------------------------------------------------------------- the task


@dataclass(frozen=True)
class PG19(SetTask):
    """The input is the tokens x of books (PG-19). The output at every position t is a distribution
    of the next token; the loss is the mean of -log p(x_{t+1} | x_0, ..., x_t).

    A batch has tokens [B, L] and targets, the tokens one position later. A model gets both and
    returns `-log p` of each target, [B, L], because the logits of 32000 tokens at every position
    would not fit in memory. Blocks of the data set may be divided: a `length` of 512 makes 8
    sequences of a block of 4096. Validation and test use the first `held_out` sequences; 0 is all.
    """

    length: int = 4096
    held_out: int = 0

    name: ClassVar[str] = "pg19"
    kind: ClassVar[str] = "language"
    metric: ClassVar[str] = "loss"
    less_is_better: ClassVar[bool] = True
    gives_targets: ClassVar[bool] = True
    metric_names: ClassVar[tuple[str, ...]] = ()
    probes: ClassVar[str] = "language modelling: the next token of a book"
    causal: ClassVar[bool] = True
    drawable: ClassVar[bool] = False
    columns: ClassVar[tuple[str, ...]] = ("tokens",)
    limits: ClassVar = {"length": (1, math.inf), "held_out": (0, math.inf)}

    @property
    def vocabulary(self) -> int:
        """The tokens of the data set's tokenizer; those of T5's without a data set."""
        exists = self.folder is not None and Path(self.folder).exists()
        return int(self._parameter("vocabulary")) if exists else _T5_VOCABULARY

    @property
    def d_output(self) -> int:
        """The vocabulary."""
        return self.vocabulary

    @property
    def input_length(self) -> int:
        """Tokens that a model reads."""
        return self.length

    def spec(self) -> ImportedSet:
        """The data set of books, cut into blocks of 4096 tokens."""
        return books_set()

    def files(self) -> dict[str, bytes]:
        """Return the tokenizer, which a model needs to generate text."""
        if self.folder is None:
            return {}
        path = Path(self.folder) / shards.TOKENIZER
        if not path.is_file() or shards.sha256(path) != self._parameter("tokenizer"):
            raise ValueError(f"{path} is missing or damaged; import the set again")
        return {shards.TOKENIZER: path.read_bytes()}

    def _parameter(self, name: str) -> Any:
        return self._split("train").manifest["parameters"][name]

    def _split(self, split: str) -> shards.Split:
        stored = super()._split(split)
        if (block := stored.manifest["parameters"]["length"]) % self.length:
            blocks = f"blocks of {block} tokens, which a length of {self.length} does not divide"
            raise ValueError(f"{self.folder} has {blocks}")
        return stored

    def _parts(self, stored: shards.Split) -> int:
        """Return the number of sequences in a block."""
        return int(stored.manifest["parameters"]["length"]) // self.length

    def count(self, split: str) -> int | None:
        """Return the number of sequences of a split; None without a data set."""
        if self.folder is None:
            return None
        stored = self._split(split)
        every = len(stored) * self._parts(stored)
        return every if split == "train" else min(every, self.held_out or every)

    def _read(self, split: str, numbers: Sequence[int]) -> list[Sample]:
        """Read the first part of every block, then the second of every block, and so on."""
        stored = self._split(split)
        blocks, parts = super()._read(split, numbers), self._parts(stored)
        firsts = [number // len(stored) % parts * self.length for number in numbers]
        return [
            {"tokens": block["tokens"][first : first + self.length + 1]}
            for block, first in zip(blocks, firsts, strict=True)
        ]

    def _batch(self, samples: Sequence[Sample]) -> Batch:
        tokens = torch.from_numpy(np.stack([s["tokens"] for s in samples]).astype(np.int64))
        return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())

    def loss(
        self, output: Float[Tensor, "B L"], batch: Batch, totals: Tensor | None = None
    ) -> Tensor:
        """Cross-entropy: the mean of the outputs, `-log p` in nats."""
        self.check_output(output, batch.targets.shape)
        count = self.totals(batch) if totals is None else totals
        summed = output.sum(dtype=torch.promote_types(output.dtype, torch.float32))
        return summed / count[0].to(torch.float32)

    def totals(self, batch: Batch) -> Tensor:
        """The number of tokens to predict."""
        return element_count(batch.targets)

    def weight(self, batch: Batch) -> int:
        """The number of tokens: each has the same weight, also in a smaller last batch."""
        return batch.targets.numel()

    def metrics(self, output: Tensor, batch: Batch) -> dict[str, Tensor]:
        """No metrics besides the loss."""
        del output, batch
        return {}

    def summary(self, means: dict[str, float]) -> dict[str, float]:
        """Add the perplexity, `exp(loss)`."""
        return {**means, "perplexity": float(np.exp(min(means["loss"], 700.0)))}

    def preview(self, *, split: str = "train", step: int = 0) -> "Figure":
        """Draw the beginning of a sequence as text."""
        tokens: Int[Tensor, " L"] = self.sample(1, split=split, step=step).inputs[0]
        tokenizer = make_tokenizer(self.files()[shards.TOKENIZER], str(self.folder))
        text = tokenizer.decode(tokens.tolist())
        return self.captioned(page_figure([("tokens of a book, decoded", text)]))
