"""PG-19: books as one long stream of tokens, cut into sequences for a language model.

Books lie in the folders `train`, `validation` and `test`, at any depth, or in Parquet files that
begin with these names, as in the official release; or elsewhere, and then a book is held out by the
SHA-256 of its file's name, one in ten for validation and one in ten for test. A split is its books
one after the other, the end token behind each. Text is tokenized in pieces of PIECE characters that
end before a space, so that memory stays flat.
"""

import base64
import hashlib
import io
import itertools
import json
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
from dlrnn.tasks import shards
from dlrnn.tasks.archives import Entry, entries
from dlrnn.tasks.imports import ImportedSet, Row, no_draw
from dlrnn.tasks.layouts import parquet_rows
from dlrnn.tasks.sets import SetTask
from dlrnn.tasks.task import Batch, wrong_output
from dlrnn.tasks.text import page_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from tokenizers import Tokenizer

PIECE = 2**16  # characters that are tokenized at once
_AT_ONCE = 16  # pieces that the tokenizer's threads share
_SPLITS = ("train", "validation", "test")
_PARQUET = re.compile(r"(train|validation|test)(?:-.*)?\.parquet")
_ENDS = ("</s>", "<|endoftext|>", "<eos>", "[SEP]")
_LARGEST = 2**27  # bytes of a tokenizer
MOST_GROWTH = 2**10  # times that the replacements of a tokenizer may lengthen a text
_T5 = 32100  # tokens of T5's tokenizer

# ---------------------------------------------------------------------------------- tokenizers


def read_tokenizer(path: Path) -> bytes:
    """A tokenizer.json as it lies there, or compressed."""
    for entry in entries(path, member_bytes=_LARGEST) if path.is_file() else ():
        with entry.open() as file:
            return file.read()
    raise ValueError(f"there is no file {path}; a tokenizer.json was expected")


def make_tokenizer(content: bytes, where: str | Path) -> "Tokenizer":
    """What a tokenizer.json describes; `where` it was, for a sentence."""
    from tokenizers import Tokenizer

    with tokenizer_errors(where):
        tokenizer = Tokenizer.from_str(content.decode())
    _check_growth(content, where)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


@contextmanager
def tokenizer_errors(where: str | Path) -> Iterator[None]:
    """Whatever the package raises on a tokenizer, as one sentence: also what Rust calls a panic."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise ValueError(f"{where} is not a usable tokenizer.json: {brief(error)}") from None


def _check_growth(content: bytes, where: str | Path) -> None:
    """Refuse replacements that together make a text more than MOST_GROWTH times as long."""
    told = json.loads(content)
    waiting, growth = [told.get("normalizer"), told.get("pre_tokenizer"), told.get("decoder")], 1
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            waiting.extend(part.values())
            growth *= _growth(part)
        elif isinstance(part, list):
            waiting.extend(part)
    if growth > MOST_GROWTH:
        raise ValueError(
            f"{where} has replacements that make a text up to {growth:.0e} times as long;"
            f" at most {MOST_GROWTH} is accepted"
        )


def _growth(part: Mapping[str, Any]) -> int:
    """How many times as long one part of a tokenizer can make a text."""
    if part.get("type") == "ByteLevel":
        return 2  # a byte becomes a character, which may have two bytes
    if isinstance(charsmap := part.get("precompiled_charsmap"), str):
        content = base64.b64decode(charsmap)  # the size of a trie, the trie, texts that end in NUL
        texts = content[4 + int.from_bytes(content[:4], "little") :].split(b"\0")
        return max(1, *map(len, texts))
    if isinstance(prepended := part.get("prepend"), str):
        return 1 + len(prepended)
    if not isinstance(replacement := part.get("content"), str):
        return 1
    is_regex = isinstance(part.get("pattern"), dict) and "Regex" in part["pattern"]
    return max(1, len(replacement) + is_regex)  # an expression may match the empty text


def vocabulary_of(tokenizer: "Tokenizer") -> int:
    """Its largest number and one more: there may be gaps."""
    return max(tokenizer.get_vocab().values(), default=0) + 1


def end_token(tokenizer: "Tokenizer", where: str | Path) -> int:
    """The token behind a book."""
    found = (tokenizer.token_to_id(name) for name in _ENDS)
    end = next((token for token in found if token is not None), None)
    if end is None:
        raise ValueError(f"{where} has no end token; {', '.join(_ENDS)} are known")
    return end


# ---------------------------------------------------------------------------------- the set


def books_set(tokenizer: Path | None = None, length: int = 4096) -> ImportedSet:
    """Blocks of `length` + 1 tokens; the last token of one is the first of the next."""
    content = None if tokenizer is None else read_tokenizer(tokenizer)
    told: dict[str, Any] = {"length": length}
    if content is not None:
        tokens = vocabulary_of(make_tokenizer(content, str(tokenizer)))
        told |= {"vocabulary": tokens, "tokenizer": hashlib.sha256(content).hexdigest()}
    kind = pa.uint16() if told.get("vocabulary", _T5) <= 2**16 else pa.uint32()
    return ImportedSet(
        name=PG19.name,
        parameters=told,
        rows=lambda path: _blocks(path, content, length),
        schema=pa.schema([pa.field("tokens", pa.list_(pa.field("token", kind, False)), False)]),
        layout=f"a folder of books (.txt, or Parquet with a column text), more than {length} tokens"
        " for each of train, validation and test (their folders, else by chance of a book's name),",
        splits=_SPLITS,
        shard_rows=2**12,
        group_rows=64,
        writer={"use_dictionary": False},
        tokenizer=content,
    )


def _blocks(path: Path, content: bytes | None, length: int) -> Iterator[Row]:
    """The streams of all splits, cut; what is left of each at the end is dropped."""
    if content is None:
        raise ValueError(f"{PG19.name} needs a tokenizer: say --tokenizer FILE, a tokenizer.json")
    tokenizer = make_tokenizer(content, "the tokenizer")
    end = end_token(tokenizer, "the tokenizer")
    streams: dict[str, Int[np.ndarray, " left"]] = {}  # what is not yet yielded
    for split, text in _books(path):
        left = streams.get(split, np.empty(0, dtype=np.uint32))
        for tokens in itertools.chain(_encoded(tokenizer, text), [[end]]):
            left = np.concatenate((left, np.array(tokens, dtype=np.uint32)))
            while len(left) > length:
                yield split, {"tokens": left[: length + 1]}
                left = left[length:]
        streams[split] = left


def _encoded(tokenizer: "Tokenizer", text: Iterable[str]) -> Iterator[list[int]]:
    """Tokens of a text that comes in parts, a piece after the other."""
    pieces = _pieces(text)
    while some := list(itertools.islice(pieces, _AT_ONCE)):
        with tokenizer_errors("the tokenizer"):
            encoded = tokenizer.encode_batch_fast(some, add_special_tokens=False)
        for piece in encoded:
            yield piece.ids


def _pieces(text: Iterable[str]) -> Iterator[str]:
    """At most PIECE characters, cut before a space where there is one: a function of the text."""
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


def _books(path: Path) -> Iterator[tuple[str, Iterator[str]]]:
    """The split of each book and its text, in parts."""
    sorted_out: dict[bool, str] = {}  # is it in a folder of a split? one that is, one that is not
    for entry in entries(path):
        kind = Path(entry.name).suffix
        if kind not in (".txt", ".parquet") or Path(entry.name).name.startswith("."):
            continue
        split = _named(path, entry.name)
        sorted_out.setdefault(split is not None, entry.name)
        if len(sorted_out) == 2:
            both = f"{sorted_out[True]} in a folder of a split and {sorted_out[False]} in none"
            raise ValueError(f"{path} holds {both}; keep one of the two layouts")
        if kind == ".txt":
            yield split or _hashed(Path(entry.name).name), _text(path, entry)
            continue
        for number, row in enumerate(parquet_rows(path, entry, ["text"])):
            name = f"{Path(entry.name).name}/{number}"
            text = "" if row["text"] is None else row["text"]
            if not isinstance(text, str):
                raise ValueError(
                    f"{path}: {entry.name} row {number} is no text but {type(text).__name__}"
                )
            yield split or _hashed(name), iter([text])


def _named(path: Path, name: str) -> str | None:
    """The split that a book's folders or its Parquet file are named after, if any."""
    *folders, file = PurePosixPath(name).parts
    named = {folder for folder in folders if folder in _SPLITS}
    if found := _PARQUET.fullmatch(file):
        named.add(found[1])
    if len(named) > 1:
        raise ValueError(f"{path}: {name} is in two splits, {' and '.join(sorted(named))}")
    return named.pop() if named else None


def _hashed(name: str) -> str:
    """The split of a book that lies in no split's folder."""
    digit = int.from_bytes(hashlib.sha256(name.encode(errors="surrogateescape")).digest()) % 10
    return {0: "test", 1: "validation"}.get(digit, "train")


def _text(path: Path, entry: Entry) -> Iterator[str]:
    """A file's text: UTF-8, with or without its mark; every end of a line is a line feed."""
    with entry.open() as file:
        lines = io.TextIOWrapper(file, encoding="utf-8-sig")
        try:
            while part := lines.read(PIECE):
                yield part
        except UnicodeDecodeError:
            raise ValueError(f"{path}: {entry.name} is not UTF-8") from None
        lines.detach()


# ---------------------------------------------------------------------------------- the task


@dataclass(frozen=True)
class PG19(SetTask):
    """The next token of a book, at every position: after `It was a dark and stormy`, `night`.

    A batch has tokens [B, L] and as targets the same ones, a position later. A model is given both
    and answers with `-log p` of each target, [B, L]: the logits of 32000 tokens everywhere would
    not fit. The set's blocks may be divided: a `length` of 512 makes 8 sequences of one of 4096.
    Of validation and test the first `held_out` sequences count; 0 is all of them.
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

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.length < 1:
            raise ValueError(f"{self.name}: the length must be at least 1, not {self.length}")
        if self.held_out < 0:
            raise ValueError(f"{self.name}: held_out must be at least 0, not {self.held_out}")

    @property
    def vocabulary(self) -> int:
        """Tokens of the set's tokenizer; T5's as long as there is no set."""
        there = self.folder is not None and Path(self.folder).exists()
        return int(self._told("vocabulary")) if there else _T5

    @property
    def d_output(self) -> int:
        """The vocabulary."""
        return self.vocabulary

    @property
    def input_length(self) -> int:
        """Tokens that a model reads."""
        return self.length

    @property
    def output_length(self) -> int:
        """A prediction for each."""
        return self.length

    def spec(self) -> ImportedSet:
        """The books, cut into blocks of 4096 tokens."""
        return books_set()

    def files(self) -> dict[str, bytes]:
        """The tokenizer, without which a model of it writes nothing."""
        if self.folder is None:
            return {}
        path = Path(self.folder) / shards.TOKENIZER
        if not path.is_file() or shards.sha256(path) != self._told("tokenizer"):
            raise ValueError(f"{path} is missing or damaged; import the set again")
        return {shards.TOKENIZER: path.read_bytes()}

    def _fixed(self) -> dict[str, Any]:
        return {}

    def _told(self, name: str) -> Any:
        return self._split("train").manifest["parameters"][name]

    def _split(self, split: str) -> shards.Split:
        stored = super()._split(split)
        if (block := stored.manifest["parameters"]["length"]) % self.length:
            blocks = f"blocks of {block} tokens, which a length of {self.length} does not divide"
            raise ValueError(f"{self.folder} has {blocks}")
        return stored

    def _parts(self, stored: shards.Split) -> int:
        """Sequences of a block."""
        return int(stored.manifest["parameters"]["length"]) // self.length

    def count(self, split: str) -> int | None:
        """Sequences of a split; None without a set."""
        if self.folder is None:
            return None
        stored = self._split(split)
        every = len(stored) * self._parts(stored)
        return every if split == "train" else min(every, self.held_out or every)

    def _drawn(self, split: str, numbers: Sequence[int]) -> list[Mapping[str, Any]]:
        raise ValueError(no_draw(self.name))

    def _read(self, split: str, numbers: Sequence[int]) -> list[Mapping[str, Any]]:
        """The first part of every block, then the second of every block, and so on."""
        stored = self._split(split)
        blocks, parts = super()._read(split, numbers), self._parts(stored)
        firsts = [number // len(stored) % parts * self.length for number in numbers]
        return [
            {"tokens": block["tokens"][first : first + self.length + 1]}
            for block, first in zip(blocks, firsts, strict=True)
        ]

    def _batch(self, samples: Sequence[Mapping[str, Any]]) -> Batch:
        tokens = torch.from_numpy(np.stack([s["tokens"] for s in samples]).astype(np.int64))
        return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())

    def loss(
        self, output: Float[Tensor, "B L"], batch: Batch, totals: Tensor | None = None
    ) -> Tensor:
        """The mean of `-log p`, in nats: cross-entropy."""
        if output.shape != batch.targets.shape:
            raise wrong_output(self.name, output, batch.targets.shape)
        count = self.totals(batch) if totals is None else totals
        return output.sum(dtype=torch.promote_types(output.dtype, torch.float32)) / count[0].to(
            torch.float32
        )

    def totals(self, batch: Batch) -> Tensor:
        """Tokens that are predicted."""
        count = batch.targets.numel()
        return torch.full((1,), count, dtype=torch.float64, device=batch.targets.device)

    def weight(self, batch: Batch) -> int:
        """Every token counts the same, also those of a last batch that is smaller."""
        return batch.targets.numel()

    def metrics(self, output: Tensor, batch: Batch) -> dict[str, Tensor]:
        """None besides the loss."""
        del output, batch
        return {}

    def summary(self, means: dict[str, float]) -> dict[str, float]:
        """With the perplexity of a token, `exp(loss)`."""
        return {**means, "perplexity": float(np.exp(min(means["loss"], 700.0)))}

    def preview(self, *, split: str = "train", step: int = 0) -> "Figure":
        """The beginning of a sequence, as text."""
        tokens: Int[Tensor, " L"] = self.sample(1, split=split, step=step).inputs[0]
        tokenizer = make_tokenizer(self.files()[shards.TOKENIZER], str(self.folder))
        return page_figure([(f"{self.name}: tokens of a book", tokenizer.decode(tokens.tolist()))])
