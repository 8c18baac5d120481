"""Speech Commands: which of ten words is said, from the raw waveform (16 kHz, one second).

Clips are `WORD/SPEAKER_nohash_NUMBER.wav` (or .flac). The split is what the release says, in
`validation_list.txt` and `testing_list.txt` (all others train), in `MANIFEST.tsv` (split, label,
path, samples) or in the names of the Hub's Parquet files. Where it says nothing, the rule by which
the official lists were made decides: the SHA-1 of the speaker's name, 10% validation, 10% test, so
that nobody is heard in two splits. Clips of other words are left out.
"""

import hashlib
import io
import re
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import torch

from dlrnn.common.figures import new_figure
from dlrnn.tasks.archives import Entry, entries
from dlrnn.tasks.classes import OneClass
from dlrnn.tasks.imports import ImportedSet, Row, no_draw
from dlrnn.tasks.layouts import hub_split, parquet_rows, text_lines
from dlrnn.tasks.sets import SetTask
from dlrnn.tasks.sounds import read_sound
from dlrnn.tasks.task import Batch

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WORDS = ("yes", "no", "up", "down", "left", "right", "on", "off", "stop", "go")
"""Class i is word i."""
RATE = LENGTH = 16_000
UNIT = 2600.0
"""A sample of 16 bits is divided by it: the standard deviation of the training clips, about."""

_CLIP = re.compile(r"(?:.*/)?([^/]+)/([^/.][^/]*)\.(?:wav|flac)")
_NAMED = re.compile(r"(.+)_nohash_\d+")
_LISTS = {"validation_list.txt": "validation", "testing_list.txt": "test"}
_MANIFEST = "MANIFEST.tsv"
_COLUMNS = ["split", "label", "path", "samples"]


def speech_set() -> ImportedSet:
    """Clips of at most a second."""
    samples = pa.list_(pa.field("element", pa.int16(), False))
    return ImportedSet(
        name=SpeechCommands.name,
        parameters={"rate": RATE, "words": list(WORDS)},
        rows=_clips,
        schema=pa.schema(
            [
                pa.field("samples", samples, False),
                pa.field("label", pa.uint8(), False),
                pa.field("clip", pa.string(), False),
            ]
        ),
        layout="WORD/SPEAKER_nohash_NUMBER.{wav,flac} or {train,validation,test}-*-of-*.parquet",
        splits=("train", "validation", "test"),
        shard_rows=2**11,
        group_rows=64,
        order=lambda row: hashlib.sha256(row["clip"].encode()).digest(),  # not word after word
        writer={
            "use_dictionary": ["label"],
            "column_encoding": {"samples.list.element": "DELTA_BINARY_PACKED"},
        },
    )


def _clips(path: Path) -> Generator[Row, None, str | None]:
    told = _Told(path)
    others: Counter[str] = Counter()
    for entry, split in _files(path):
        found = _CLIP.fullmatch(entry.name)
        if found is None:
            continue
        word, stem = found.groups()
        if word not in WORDS:
            others[word] += 1
            continue
        where, clip = f"{path}: {entry.name}", f"{word}/{stem}"
        told_split = told.split(where, clip)
        samples = read_sound(where, entry, rate=RATE, longest=LENGTH)
        told.check(where, clip, len(samples))
        label = WORDS.index(word)
        yield split or told_split, {"samples": samples, "label": label, "clip": clip}
    told.check_all_seen()
    if not others:
        return None
    return f"left out: {others.total()} clips of {len(others)} other words ({_some(others)})"


def _some(names: Mapping[str, int]) -> str:
    return ", ".join(sorted(names)[:5]) + (", ..." if len(names) > 5 else "")


def _files(path: Path) -> Iterator[tuple[Entry, str | None]]:
    """Files, and those that are rows of Parquet, with their split."""
    for entry in entries(path):
        split = hub_split(entry.name)
        if split is None:
            yield entry, None
            continue
        for number, row in enumerate(parquet_rows(path, entry, ["file", "audio"])):
            name, audio = row["file"], row["audio"]
            data = audio.get("bytes") if isinstance(audio, dict) else None
            if not isinstance(name, str) or not isinstance(data, bytes):
                raise ValueError(f"{path}: {entry.name} row {number} has no file or no audio")
            yield Entry(name, len(data), partial(_in_memory, data)), split


def _in_memory(data: bytes) -> io.BufferedReader:
    return io.BufferedReader(cast("io.RawIOBase", io.BytesIO(data)))


def hashed_split(speaker: str) -> str:
    """The official rule for what is in no list."""
    number = int.from_bytes(hashlib.sha1(speaker.encode()).digest()) % 2**27
    percent = number * 100 / (2**27 - 1)
    return "validation" if percent < 10 else "test" if percent < 20 else "train"


class _Told:
    """What the files beside the clips say: found first, wherever in an archive they lie."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lists: dict[str, str] = {}  # splits of clips, those of training left out
        self.manifest: dict[str, tuple[str, int]] = {}  # splits and lengths of clips
        self.seen: set[str] = set()
        here: set[str] = set()
        for entry in entries(path):
            name = entry.name.rpartition("/")[2]
            if name in here:
                raise ValueError(f"{path}: {entry.name} is a second {name}")
            if name in _LISTS or name == _MANIFEST:
                here.add(name)
                with entry.open() as file:
                    lines = text_lines(f"{path}: {entry.name}", file)
                    if name in _LISTS:
                        self._read_list(f"{path}: {entry.name}", lines, _LISTS[name])
                    else:
                        self._read_manifest(f"{path}: {entry.name}", lines)
        if len(here & _LISTS.keys()) == 1:
            there, lacks = sorted(_LISTS, key=lambda name: name not in here)
            raise ValueError(f"{path} holds {there} and no {lacks}; both or none are expected")
        self.has_lists = bool(here & _LISTS.keys())
        self.has_manifest = _MANIFEST in here

    def _read_list(self, where: str, lines: Iterator[str], split: str) -> None:
        for number, line in enumerate(lines, start=1):
            found = _CLIP.fullmatch(line.strip())
            if found is None:
                raise ValueError(f"{where} line {number} names no clip: {line.strip()[:60]!r}")
            clip = "/".join(found.groups())
            if self.lists.setdefault(clip, split) != split:
                raise ValueError(f"{where} line {number}: {clip} is in the other list, too")

    def _read_manifest(self, where: str, lines: Iterator[str]) -> None:
        for number, line in enumerate(lines, start=1):
            row = line.rstrip("\r\n").split("\t")
            if number == 1 and row == _COLUMNS:
                continue
            if number == 1 or len(row) != len(_COLUMNS):
                raise ValueError(f"{where} line {number} is not {', '.join(_COLUMNS)}")
            split, label, name, samples = row
            found = _CLIP.fullmatch(name)
            if split not in ("train", "validation", "test"):
                raise ValueError(f"{where} line {number} has the split {split[:40]!r}")
            if found is None or not re.fullmatch(r"[0-9]{1,9}", samples):
                raise ValueError(f"{where} line {number} names no clip and its samples")
            if label != found[1]:
                raise ValueError(
                    f"{where} line {number} has the label {label[:40]!r} for {name[:200]}"
                )
            clip = "/".join(found.groups())
            if clip in self.manifest:
                raise ValueError(f"{where} line {number}: {clip[:200]} is named twice")
            self.manifest[clip] = split, int(samples)

    def split(self, where: str, clip: str) -> str:
        """Of a clip that was not yet seen."""
        named = _NAMED.fullmatch(clip.partition("/")[2])
        if named is None:
            raise ValueError(f"{where} is not named SPEAKER_nohash_NUMBER")
        if clip in self.seen:
            raise ValueError(f"{where} is there twice")
        self.seen.add(clip)
        if self.has_manifest:
            if clip not in self.manifest:
                raise ValueError(f"{where} is not in {_MANIFEST}")
            return self.manifest[clip][0]
        if self.has_lists:
            return self.lists.get(clip, "train")
        return hashed_split(named[1])

    def check(self, where: str, clip: str, samples: int) -> None:
        """Is a clip as long as the manifest says?"""
        if self.has_manifest and samples != (expected := self.manifest[clip][1]):
            raise ValueError(f"{where} has {samples} samples, not {expected} as in {_MANIFEST}")

    def check_all_seen(self) -> None:
        """Are all clips of the manifest there?"""
        for clip in self.manifest:
            if clip not in self.seen and clip.partition("/")[0] in WORDS:
                raise ValueError(f"{self.path}: {clip} is in {_MANIFEST} and not there")


# ---------------------------------------------------------------------------------- the task


@dataclass(frozen=True)
class SpeechCommands(OneClass, SetTask):
    """One second of speech, 16000 samples: which of WORDS is said?

    Samples of 16 bits divided by UNIT. A shorter clip is followed by zeros, which are silence: a
    model reads them as it reads the rest.
    """

    name: ClassVar[str] = "speech-commands"
    probes: ClassVar[str] = "raw sound, 16000 samples"
    causal: ClassVar[bool] = False
    drawable: ClassVar[bool] = False
    columns: ClassVar[tuple[str, ...]] = ("samples", "label")

    @property
    def d_input(self) -> int:
        """The sample."""
        return 1

    @property
    def d_output(self) -> int:
        """The words."""
        return len(WORDS)

    @property
    def input_length(self) -> int:
        """A second."""
        return LENGTH

    def spec(self) -> ImportedSet:
        """The clips."""
        return speech_set()

    def _fixed(self) -> dict[str, Any]:
        return dict(self.spec().parameters)

    def _drawn(self, split: str, numbers: Sequence[int]) -> list[Mapping[str, Any]]:
        raise ValueError(no_draw(self.name))

    def _batch(self, samples: Sequence[Mapping[str, Any]]) -> Batch:
        waves = np.zeros((len(samples), LENGTH, 1), dtype=np.float32)  # [B, L, 1]
        for wave, sample in zip(waves, samples, strict=True):
            wave[: len(sample["samples"]), 0] = sample["samples"]
        labels = torch.tensor([int(sample["label"]) for sample in samples])
        return Batch(torch.from_numpy(waves / np.float32(UNIT)), labels)

    def preview(self, *, split: str = "train", step: int = 0) -> "Figure":
        """Four clips."""
        batch = self.sample(4, split=split, step=step)
        figure = new_figure(11, 5)
        seconds = np.arange(LENGTH) / RATE
        for axes, wave, label in zip(
            figure.subplots(2, 2, sharex=True).flat,
            batch.inputs[..., 0],
            batch.targets,
            strict=True,
        ):
            axes.plot(seconds, wave.numpy(), linewidth=0.5)
            axes.set_title(f"{self.name}: {WORDS[int(label)]!r}")
            axes.set(xlabel="seconds", xlim=(0, LENGTH / RATE))
            axes.spines[["top", "right"]].set_visible(False)
        return figure
