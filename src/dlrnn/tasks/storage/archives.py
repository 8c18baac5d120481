"""Read the files of a release: in a folder, a tar (.gz, .xz, .bz2), a zip, or one file (.gz, ...).

They are read in one pass, without unpacking, in constant memory. An archive is untrusted: absolute
paths, paths with `..`, links, devices, and more bytes than allowed raise ArchiveError.
"""

import bz2
import contextlib
import errno
import gzip
import io
import lzma
import os
import re
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, cast

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

MEMBER_BYTES = 2**32
TOTAL_BYTES = 2**37  # 128 GiB
LONGEST_LINE = 2**24  # bytes
LARGEST_CHUNK = 2**30  # bytes of a column in a row group of Parquet
FREE_BYTES, LARGEST_EXPANSION = 2**27, 8
"""Decoded texts of a Parquet file may have so many bytes plus so many times its uncompressed size:
more means that many rows refer to one long text in a dictionary."""
_HUB = re.compile(r"(?:.*/)?(train|validation|test)-\d{5}-of-\d{5}[^/]*\.parquet")
_HEADER_BYTES = 2**20  # of long names and attributes in a tar, which are read at once


_OPENERS: dict[str, Callable[[Path], io.BufferedIOBase]] = {
    ".gz": gzip.GzipFile,
    ".xz": lzma.LZMAFile,
    ".bz2": bz2.BZ2File,
}
_MAGIC = {b"\x1f\x8b": ".gz", b"\xfd7zXZ\0": ".xz", b"BZh": ".bz2", b"PK\3\4": ".zip"}
_SHORT = {".tgz": ".gz", ".txz": ".xz", ".tbz": ".bz2", ".tbz2": ".bz2"}
_HEADERS = (
    *(tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE),
    *(tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK),
)
_DAMAGE = (
    *(tarfile.TarError, zipfile.BadZipFile, lzma.LZMAError, zlib.error, gzip.BadGzipFile),
    *(EOFError, NotImplementedError, OverflowError, UnicodeDecodeError, struct.error),
)


class ArchiveError(ValueError):
    """An archive, or one of its members, is damaged or not acceptable."""


@dataclass(frozen=True)
class Entry:
    """A regular file; `name` is its path inside, with `/`; `size` is None if it is not known."""

    archive: Path
    name: str
    size: int | None
    open: Callable[[], io.BufferedReader | io.BytesIO]
    """Open the file; it must be read before the next entry is requested."""

    @property
    def where(self) -> str:
        """The archive and the name, for error messages."""
        return f"{self.archive}: {self.name}"

    def read(self, most: int) -> bytes:
        """Return the content, which may have at most `most` bytes."""
        with self.open() as file:
            content = file.read(most + 1)
        if len(content) > most:
            raise ValueError(f"{self.where} has more than {most} bytes")
        return content


def entries(
    path: str | os.PathLike[str],
    *,
    member_bytes: int = MEMBER_BYTES,
    total_bytes: int = TOTAL_BYTES,
) -> Iterator[Entry]:
    """Yield the regular files of a folder sorted by name, or of an archive in its order."""
    path = Path(path)
    if not path.exists():
        raise ArchiveError(f"there is no file or folder {path}")
    bounds = _Bounds(path, member_bytes, total_bytes)
    if path.is_dir():
        yield from _folder(path, path, bounds)
    elif not path.is_file():
        raise ArchiveError(f"{path} is neither a file nor a folder")
    elif (suffix := _suffix(path)) == ".zip":
        yield from _zip(path, bounds)
    elif _is_tar(path, opener := _OPENERS.get(suffix, _open)):
        yield from _tar(path, opener, bounds)
    elif opener is _open:
        yield bounds.plain_file(path.name, path)
    else:
        with _naming_damage(path), opener(path) as file:
            most = min(member_bytes, total_bytes)
            name = path.name.removesuffix(suffix)
            yield Entry(path, name, None, partial(_reader, file, path, name, most))


class _Bounds:
    """The limits of an archive: paths and sizes of its members, and their total size."""

    def __init__(self, path: Path, member_bytes: int, total_bytes: int) -> None:
        self.path, self.member_bytes, self.left = path, member_bytes, total_bytes
        self.total_bytes = total_bytes

    def name(self, name: str) -> str:
        """Return a member's path without `./`; raise for a path outside the archive."""
        parts = re.split(r"[/\\]", name)
        if not parts[0] or re.match(r"[A-Za-z]:", name) or "\0" in name:
            raise ArchiveError(f"{self.path} holds {name!r}, whose path is not relative")
        if ".." in parts:
            raise ArchiveError(f"{self.path} holds {name!r}, whose path climbs out of the folder")
        return str(PurePosixPath(name))

    def add(self, name: str, size: int) -> None:
        """Add a member's size to the total; raise if it is too large."""
        if size > self.member_bytes:
            much = f"{size} bytes, more than the {self.member_bytes} allowed"
            raise ArchiveError(f"{self.path} holds {name!r} of {much}")
        self.left -= size
        if self.left < 0:
            much = f"more than the {self.total_bytes} bytes allowed in all"
            raise ArchiveError(f"{self.path} holds {much}, from {name!r} on")

    def not_plain(self, name: str, *, is_link: bool) -> ArchiveError:
        """Return the error for a link or a device."""
        kind = "a link" if is_link else "not a plain file"
        which = f"which is {kind}; only plain files are read"
        return ArchiveError(f"{self.path} holds {name!r}, {which}")

    def plain_file(self, name: str, path: Path) -> Entry:
        """Return the entry of an uncompressed file, which is seekable."""
        size = path.stat().st_size
        self.add(name, size)
        return Entry(self.path, name, size, partial(_open, path))


# ---------------------------------------------------------------------------------- kinds


def _folder(root: Path, folder: Path, bounds: _Bounds) -> Iterator[Entry]:
    for item in sorted(os.scandir(folder), key=lambda item: item.name):
        path = Path(item.path)
        name = path.relative_to(root).as_posix()
        if item.is_dir(follow_symlinks=False):
            yield from _folder(root, path, bounds)
        elif item.is_file(follow_symlinks=False):
            yield bounds.plain_file(name, path)
        else:
            raise bounds.not_plain(name, is_link=item.is_symlink())


class _Member(tarfile.TarInfo):
    """A tar header that raises for damage which `tarfile` would take for the end of the archive."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> "_Member":
        try:
            member = super().frombuf(buf, encoding, errors)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(f"a member's header cannot be read ({error})") from None
        if member.size < 0 or (member.type in _HEADERS and member.size > _HEADER_BYTES):
            raise tarfile.ReadError("a member's header cannot be read (its size cannot be)")
        return member


def _tar(
    path: Path, opener: Callable[[Path], io.BufferedIOBase], bounds: _Bounds
) -> Iterator[Entry]:
    with _naming_damage(path), opener(path) as file:
        with tarfile.open(fileobj=file, mode="r|", tarinfo=_Member, errorlevel=2) as tar:
            while (member := _next(tar)) is not None:
                tar.members.clear()  # type: ignore[attr-defined]  # else memory would grow
                name = bounds.name(member.name)
                bounds.add(name, member.size)
                if member.isdir():
                    continue
                if not member.isreg() or member.issparse():
                    raise bounds.not_plain(name, is_link=member.issym() or member.islnk())
                content = cast(io.BufferedReader, tar.extractfile(member))
                reader = partial(_reader, content, path, name, member.size)
                yield Entry(path, name, member.size, reader)
        while after := file.read(2**20):  # the checksums at the end
            bounds.add("its end", len(after))


def _next(tar: tarfile.TarFile) -> tarfile.TarInfo | None:
    try:
        return tar.next()
    except ValueError as error:  # an attribute that should be a number
        raise tarfile.ReadError(str(error)) from None


def _zip(path: Path, bounds: _Bounds) -> Iterator[Entry]:
    with _naming_damage(path), zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            name, size = bounds.name(member.filename), member.file_size
            bounds.add(name, size)
            kind = stat.S_IFMT(member.external_attr >> 16)
            if member.is_dir():
                continue
            if kind not in (0, stat.S_IFREG):
                raise bounds.not_plain(name, is_link=kind == stat.S_IFLNK)
            if member.flag_bits & 1:
                raise ArchiveError(f"{path} holds {name!r}, which is encrypted")
            with archive.open(member) as content:
                assert isinstance(content, io.BufferedIOBase)
                yield Entry(path, name, size, partial(_reader, content, path, name, size))


def _suffix(path: Path) -> str:
    """Return the suffix of the container, from the name or else from the first bytes."""
    suffix = path.suffix.lower()
    if suffix in (*_OPENERS, ".zip"):
        return suffix
    if suffix in _SHORT:
        return _SHORT[suffix]
    with open(path, "rb") as file:
        head = file.read(6)
    return next((suffix for magic, suffix in _MAGIC.items() if head.startswith(magic)), "")


def _is_tar(path: Path, opener: Callable[[Path], io.BufferedIOBase]) -> bool:
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    if ".tar" in suffixes or _SHORT.keys() & suffixes[-1:]:
        return True
    with _naming_damage(path), opener(path) as file:
        return file.read(512)[257:262] == b"ustar"


def _open(path: Path) -> io.BufferedReader:
    return open(path, "rb")


# ---------------------------------------------------------------------------------- reading


@contextlib.contextmanager
def _naming_damage(path: Path, name: str | None = None) -> Iterator[None]:
    """Turn the errors of damaged files into an ArchiveError that names the file."""
    where = f"{path} is damaged" if name is None else f"{path} is damaged in {name!r}"
    try:
        yield
    except (*_DAMAGE, OSError) as error:
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise  # the error is of the disk, not of a decoder
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ArchiveError(f"{where}: {reason}") from None


class _Reader(io.RawIOBase):
    """The bytes of a member, at most `most`; damage raises ArchiveError."""

    def __init__(self, content: io.BufferedIOBase, path: Path, name: str, most: int) -> None:
        self._content, self._path, self._name = content, path, name
        self._most = self._left = most

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "memoryview | bytearray") -> int:  # type: ignore[override]
        with _naming_damage(self._path, self._name):
            data = self._content.read(len(buffer))
        self._left -= len(data)
        if self._left < 0:
            much = f"more bytes than the {self._most} allowed"
            raise ArchiveError(f"{self._path} holds {self._name!r} of {much}")
        buffer[: len(data)] = data
        return len(data)


def _reader(content: io.BufferedIOBase, path: Path, name: str, most: int) -> io.BufferedReader:
    return io.BufferedReader(_Reader(content, path, name, most), 2**16)


# ---------------------------------------------------------------------------------- layouts


def split_files(
    path: Path, pattern: re.Pattern[str], splits: Mapping[str, str]
) -> Iterator[tuple[str, Entry]]:
    """Yield the only file of each split; the first group of `pattern` is a key of `splits`."""
    seen: set[str] = set()
    for entry in entries(path):
        if found := pattern.fullmatch(entry.name):
            split = splits[found[1]]
            if split in seen:
                raise ValueError(f"{entry.where} is a second file of {split} samples")
            seen.add(split)
            yield split, entry


def text_lines(entry: Entry, longest: int = LONGEST_LINE) -> Iterator[str]:
    """Yield the lines of a file of UTF-8 with their line ends."""
    with entry.open() as file:
        number = 0
        while line := file.readline(longest + 1):
            number += 1
            where = f"{entry.where} line {number}"
            if len(line) > longest:
                raise ValueError(f"{where} is longer than {longest} bytes")
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")  # skip a byte order mark
            except UnicodeDecodeError:
                raise ValueError(f"{where} is not UTF-8") from None


def hub_split(name: str) -> str | None:
    """Return the split of a Parquet file named as on the Hugging Face Hub, None otherwise."""
    found = _HUB.fullmatch(name)
    return found[1] if found else None


def parquet_rows(entry: Entry, columns: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a description and the values of each row of a Parquet file in a folder."""
    where, number = entry.where, 0
    with entry.open() as file:
        if not file.seekable():
            advice = "unpack it and give the folder"
            raise ArchiveError(f"{where} is Parquet inside an archive; {advice}")
        try:
            parquet = pq.ParquetFile(file, pre_buffer=False)
            allowed = FREE_BYTES + LARGEST_EXPANSION * _checked_size(where, parquet, columns)
            # one row at a time: 64 references to a long text in a dictionary become 64 long texts
            for batch in parquet.iter_batches(1, columns=columns, use_threads=False):
                allowed -= batch.nbytes
                if allowed < 0:
                    much = "has far more text than its size: a long text is repeated"
                    advice = "write it without a dictionary, or use the original files"
                    raise ArchiveError(f"{where} {much}; {advice}")
                for row in batch.to_pylist():
                    yield f"{where} row {number}", row
                    number += 1
        except ArchiveError:
            raise
        except UnicodeDecodeError:
            raise ArchiveError(f"{where} is not UTF-8") from None
        except (pa.ArrowException, OSError, ValueError, OverflowError) as error:  # a date, say
            reason = " ".join(str(error).split())
            raise ArchiveError(f"{where} is damaged: {reason[:200]}") from None


def _checked_size(where: str, parquet: pq.ParquetFile, columns: list[str]) -> int:
    """Return the size of a file before compression.

    Missing columns, lists and large columns are refused: a few bytes may decode to many.
    """
    known = parquet.schema_arrow.names
    if lacking := [name for name in columns if name not in known]:
        raise ArchiveError(f"{where} has no column {lacking[0]!r}; it has {known}")
    groups = [parquet.metadata.row_group(group) for group in range(parquet.num_row_groups)]
    for place in range(len(parquet.schema)):
        leaf = parquet.schema.column(place)
        name = leaf.path.partition(".")[0]
        if name not in columns:
            continue
        if leaf.max_repetition_level > 0:
            raise ArchiveError(f"{where} has lists in its column {name!r}")
        for number, group in enumerate(groups):
            size = group.column(place).total_uncompressed_size
            if size > LARGEST_CHUNK:
                much = f"{size} bytes in its column {name!r}, row group {number}"
                raise ArchiveError(f"{where} has {much}; at most {LARGEST_CHUNK} were expected")
    return sum(group.total_byte_size for group in groups)
