"""Speech Commands: which of ten words is spoken, from the raw waveform (16 kHz, one second).

Clips are `WORD/SPEAKER_nohash_NUMBER.wav` (or .flac). The release gives their split in
`validation_list.txt` and `testing_list.txt` (all others are for training), in `MANIFEST.tsv`
(split, label, path, samples) or in the names of the Hub's Parquet files. Without these, the split
follows the rule of the official lists: the SHA-1 of the speaker's name, 10% validation, 10% test,
so that no speaker is in two splits. Clips of other words are skipped.
"""

import hashlib
import io
import re
import struct
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import torch
from jaxtyping import Int16

from dlrnn.common.figures import new_figure
from dlrnn.tasks.base import Batch, ClassificationTask
from dlrnn.tasks.random import SPLITS
from dlrnn.tasks.storage.archives import Entry, entries, hub_split, parquet_rows, text_lines
from dlrnn.tasks.storage.sets import SetTask, labels_of
from dlrnn.tasks.storage.specs import ImportedSet, Row, Sample, list_of, schema_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WORDS = ("yes", "no", "up", "down", "left", "right", "on", "off", "stop", "go")
"""The word of each class."""
RATE = LENGTH = 16_000
UNIT = 2600.0
"""16-bit samples are divided by it: about the standard deviation of the training clips."""

_CLIP = re.compile(r"(?:.*/)?([^/]+)/([^/.][^/]*)\.(?:wav|flac)")
_NAMED = re.compile(r"(.+)_nohash_\d+")
_LISTS = {"validation_list.txt": "validation", "testing_list.txt": "test"}
_MANIFEST = "MANIFEST.tsv"
_COLUMNS = ["split", "label", "path", "samples"]


def speech_set() -> ImportedSet:
    """Return the data set of clips of at most one second."""
    return ImportedSet(
        name=SpeechCommands.name,
        parameters={"rate": RATE, "words": list(WORDS)},
        rows=_clips,
        schema=schema_of(samples=list_of(pa.int16()), label=pa.uint8(), clip=pa.string()),
        layout="WORD/SPEAKER_nohash_NUMBER.{wav,flac} or {train,validation,test}-*-of-*.parquet",
        shard_rows=2**11,
        order=_digest,  # archives are sorted by word
        writer={
            "use_dictionary": ["label"],
            "column_encoding": {"samples.list.element": "DELTA_BINARY_PACKED"},
        },
    )


def _digest(sample: Sample) -> bytes:
    return hashlib.sha256(sample["clip"].encode()).digest()


def _clips(path: Path) -> Generator[Row, None, str | None]:
    lists, manifest = _splits(path)
    others: Counter[str] = Counter()
    seen: set[str] = set()
    for entry, split in _files(path):
        found = _CLIP.fullmatch(entry.name)
        if found is None:
            continue
        word, stem = found.groups()
        if word not in WORDS:
            others[word] += 1
            continue
        clip, named = f"{word}/{stem}", _NAMED.fullmatch(stem)
        if named is None:
            raise ValueError(f"{entry.where} is not named SPEAKER_nohash_NUMBER")
        if clip in seen:
            raise ValueError(f"{entry.where} occurs twice")
        seen.add(clip)
        samples = _read_sound(entry)
        known = hashed_split(named[1]) if lists is None else lists.get(clip, "train")
        if manifest is not None:
            known = _described_split(entry.where, clip, len(samples), manifest)
        label = WORDS.index(word)
        yield split or known, {"samples": samples, "label": label, "clip": clip}
    for clip in manifest or ():
        if clip not in seen and clip.partition("/")[0] in WORDS:
            raise ValueError(f"{path}: {clip} is in {_MANIFEST} but missing")
    if not others:
        return None
    some = ", ".join(sorted(others)[:5]) + (", ..." if len(others) > 5 else "")
    return f"left out: {others.total()} clips of {len(others)} other words ({some})"


def _files(path: Path) -> Iterator[tuple[Entry, str | None]]:
    """Yield files without a split, and files in rows of Parquet with their split."""
    for entry in entries(path):
        split = hub_split(entry.name)
        if split is None:
            yield entry, None
            continue
        for where, row in parquet_rows(entry, ["file", "audio"]):
            name, audio = row["file"], row["audio"]
            data = audio.get("bytes") if isinstance(audio, dict) else None
            if not isinstance(name, str) or not isinstance(data, bytes):
                raise ValueError(f"{where} has no file or no audio")
            yield Entry(path, name, len(data), partial(io.BytesIO, data)), split


def hashed_split(speaker: str) -> str:
    """Return the split of a speaker by the rule of the official lists."""
    number = int.from_bytes(hashlib.sha1(speaker.encode()).digest()) % 2**27
    percent = number * 100 / (2**27 - 1)
    return "validation" if percent < 10 else "test" if percent < 20 else "train"


# ---------------------------------------------------------------------------------- splits


def _splits(path: Path) -> tuple[dict[str, str] | None, dict[str, tuple[str, int]] | None]:
    """Return the lists and the manifest of a release, which are read before its clips.

    Lists have the splits of clips that are not for training, a manifest splits and lengths.
    """
    lists: dict[str, str] = {}
    manifest: dict[str, tuple[str, int]] = {}
    present: set[str] = set()
    for entry in entries(path):
        name = entry.name.rpartition("/")[2]
        if name not in (*_LISTS, _MANIFEST):
            continue
        if name in present:
            raise ValueError(f"{entry.where} is a second {name}")
        present.add(name)
        for number, line in enumerate(text_lines(entry), start=1):
            where = f"{entry.where} line {number}"
            if name != _MANIFEST:
                _read_listed(where, line.strip(), _LISTS[name], lists)
                continue
            row = line.rstrip("\r\n").split("\t")
            if len(row) != len(_COLUMNS) or (number == 1 and row != _COLUMNS):
                raise ValueError(f"{where} is not {', '.join(_COLUMNS)}")
            if number > 1:
                _read_described(where, row, manifest)
    if len(present & _LISTS.keys()) == 1:
        found, missing = sorted(_LISTS, key=lambda name: name not in present)
        raise ValueError(f"{path} holds {found} and no {missing}; expected both or neither")
    return lists if present & _LISTS.keys() else None, manifest if _MANIFEST in present else None


def _read_listed(where: str, line: str, split: str, lists: dict[str, str]) -> None:
    """Add a line of a list; errors begin with `where`."""
    found = _CLIP.fullmatch(line)
    if found is None:
        raise ValueError(f"{where} is not a clip: {line[:60]!r}")
    clip = "/".join(found.groups())
    if lists.setdefault(clip, split) != split:
        raise ValueError(f"{where}: {clip} is also in the other list")


def _read_described(where: str, row: list[str], manifest: dict[str, tuple[str, int]]) -> None:
    """Add a line of the manifest; errors begin with `where`."""
    split, label, name, samples = row
    found = _CLIP.fullmatch(name)
    if split not in SPLITS[:3]:
        raise ValueError(f"{where} has the split {split[:40]!r}")
    if found is None or not re.fullmatch(r"[0-9]{1,9}", samples):
        raise ValueError(f"{where} has no clip and its number of samples")
    if label != found[1]:
        raise ValueError(f"{where} has the label {label[:40]!r} for {name[:200]}")
    clip = "/".join(found.groups())
    if clip in manifest:
        raise ValueError(f"{where}: {clip[:200]} occurs twice")
    manifest[clip] = split, int(samples)


def _described_split(
    where: str, clip: str, samples: int, manifest: dict[str, tuple[str, int]]
) -> str:
    """Return the split of a clip in the manifest, which must also have its length."""
    if clip not in manifest:
        raise ValueError(f"{where} is not in {_MANIFEST}")
    split, expected = manifest[clip]
    if samples != expected:
        raise ValueError(f"{where} has {samples} samples, not {expected} as in {_MANIFEST}")
    return split


# ---------------------------------------------------------------------------------- sounds


def _read_sound(entry: Entry) -> Int16[np.ndarray, " T"]:
    """Return 1 to LENGTH samples of a WAV or FLAC file."""
    import soundfile  # type: ignore[import-untyped]

    where = entry.where
    data = entry.read(2**17 + 8 * LENGTH)  # with all that such a file may contain besides samples
    if data.startswith(b"RIFF") and not _is_whole_wav(data):
        raise ValueError(f"{where} is damaged: it is truncated")
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as sound:
            _check_sound(where, sound)
            announced: int = sound.frames
            samples: Int16[np.ndarray, " T"] = sound.read(announced, dtype="int16")
    except soundfile.LibsndfileError as error:
        raise ValueError(f"{where} is damaged: {error.error_string}") from None
    if len(samples) != announced:
        found = f"its header announces {announced} samples, and it has {len(samples)}"
        raise ValueError(f"{where} is damaged: {found}")
    return samples


def _is_whole_wav(data: bytes) -> bool:
    """Return whether a WAV file has all its samples: libsndfile accepts a truncated one."""
    place = 12
    while place + 8 <= len(data):
        name, size = struct.unpack_from("<4sI", data, place)
        if place + 8 + size > len(data):
            return False
        if name == b"data":
            return True
        place += 8 + size + size % 2
    return False


def _check_sound(where: str, sound: Any) -> None:
    if sound.format not in ("WAV", "WAVEX", "FLAC") or sound.subtype != "PCM_16":
        kind = f"{sound.format} {sound.subtype}"
        raise ValueError(f"{where} is {kind}; expected WAV or FLAC with 16 bits")
    if sound.samplerate != RATE:
        raise ValueError(f"{where} has {sound.samplerate} samples per second, not {RATE}")
    if sound.channels != 1:
        raise ValueError(f"{where} has {sound.channels} channels, not 1")
    if not 1 <= sound.frames <= LENGTH:
        raise ValueError(f"{where} has {sound.frames} samples; expected 1 to {LENGTH}")


# ---------------------------------------------------------------------------------- the task


@dataclass(frozen=True)
class SpeechCommands(ClassificationTask, SetTask):
    """The input is one second of speech as 16000 samples of the waveform (Speech Commands). The
    output is the spoken word, one of ten: yes, no, up, down, left, right, on, off, stop, go.

    16-bit samples are divided by UNIT. Shorter clips are padded with zeros, which are silence and
    which a model reads.
    """

    name: ClassVar[str] = "speech-commands"
    probes: ClassVar[str] = "raw sound, 16000 samples"
    causal: ClassVar[bool] = False
    drawable: ClassVar[bool] = False
    columns: ClassVar[tuple[str, ...]] = ("samples", "label")
    required: ClassVar[tuple[str, ...]] = ("rate", "words")
    d_input: ClassVar[int] = 1  # the sample
    d_output: ClassVar[int] = len(WORDS)
    input_length: ClassVar[int] = LENGTH

    def spec(self) -> ImportedSet:
        """The data set of clips."""
        return speech_set()

    def _batch(self, samples: Sequence[Sample]) -> Batch:
        waves = np.zeros((len(samples), LENGTH, 1), dtype=np.float32)  # [B, L, 1]
        for wave, sample in zip(waves, samples, strict=True):
            wave[: len(sample["samples"]), 0] = sample["samples"]
        return Batch(torch.from_numpy(waves / np.float32(UNIT)), labels_of(samples))

    def preview(self, *, split: str = "train", step: int = 0) -> "Figure":
        """Draw four clips."""
        batch = self.sample(4, split=split, step=step)
        figure = new_figure(11, 5)
        seconds = np.arange(LENGTH) / RATE
        panels = figure.subplots(2, 2, sharex=True).flat
        for axes, wave, label in zip(panels, batch.inputs[..., 0], batch.targets, strict=True):
            axes.plot(seconds, wave.numpy(), linewidth=0.5)
            axes.set_title(f"target: {WORDS[int(label)]!r}")
            axes.set(xlabel="seconds", xlim=(0, LENGTH / RATE))
            axes.spines[["top", "right"]].set_visible(False)
        return self.captioned(figure)
