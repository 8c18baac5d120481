"""Reading a short sound, WAV or FLAC of 16 bits and one channel: all of it, or one sentence."""

import io
import struct
from typing import Any, cast

import numpy as np
from jaxtyping import Int16

from dlrnn.tasks.archives import Entry

_KINDS = ("WAV", "WAVEX", "FLAC")


def read_sound(where: str, entry: Entry, *, rate: int, longest: int) -> Int16[np.ndarray, " T"]:
    """Its samples, at least one and at most `longest`; `where` it is, for a sentence."""
    import soundfile  # type: ignore[import-untyped]

    largest = 2**17 + 8 * longest  # bytes, with whatever else such a file holds
    with entry.open() as file:
        data = file.read(largest + 1)
    if len(data) > largest:
        raise ValueError(f"{where} has more than {largest} bytes; {longest} samples have less")
    if data.startswith(b"RIFF"):
        _check_wav(where, data)
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as sound:
            _check_kind(where, sound, rate, longest)
            announced: int = sound.frames
            samples = sound.read(announced, dtype="int16")
    except soundfile.LibsndfileError as error:
        raise ValueError(f"{where} is damaged: {error.error_string}") from None
    if len(samples) != announced:
        raise ValueError(f"{where} is damaged: {announced} samples announced, {len(samples)} there")
    return cast("Int16[np.ndarray, ' T']", samples)


def _check_wav(where: str, data: bytes) -> None:
    """Is all of the sound there? libsndfile reads a WAV that was cut off as a shorter one."""
    place = 12
    while place + 8 <= len(data):
        name, size = struct.unpack_from("<4sI", data, place)
        if place + 8 + size > len(data):
            break
        if name == b"data":
            return
        place += 8 + size + size % 2
    raise ValueError(f"{where} is damaged: it is cut off")


def _check_kind(where: str, sound: Any, rate: int, longest: int) -> None:
    if sound.format not in _KINDS or sound.subtype != "PCM_16":
        kind = f"{sound.format} {sound.subtype}"
        raise ValueError(f"{where} is {kind}; WAV or FLAC of 16 bits was expected")
    if sound.samplerate != rate:
        raise ValueError(f"{where} has {sound.samplerate} samples a second, not {rate}")
    if sound.channels != 1:
        raise ValueError(f"{where} has {sound.channels} channels, not 1")
    if not 1 <= sound.frames <= longest:
        raise ValueError(f"{where} has {sound.frames} samples; 1 to {longest} were expected")
