"""Read untrusted files: those of a run, an exported model, a data set or a results folder.

This module is the only one that parses them, and it enforces these rules:

- sizes are limited, links and special files are refused (`read_bytes`);
- JSON holds scalars, lists and mappings; strings hold no control characters; a key that could name
  a class (`class_path`) is refused (`parse_json`);
- values have the types of a schema, and unknown keys are refused (`fit`, `fit_fields`);
- safetensors files carry a SHA-256 of all their bytes (`seal`, `read_sealed`);
- a class that a file names is imported only if it belongs to dlrnn, or if the user trusts the file
  (`check_import`).

Every refusal is a ValueError of one sentence that names the file.
"""

import hashlib
import json
import os
import re
import stat
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import MISSING, fields, is_dataclass
from functools import partial
from importlib import import_module
from io import BufferedReader
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    NamedTuple,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from dlrnn.common.cached import cached
from dlrnn.common.files import naming, require_regular

if TYPE_CHECKING:
    from torch import Tensor

MOST_JSON = 2**24  # bytes of a JSON file
MOST_LINES = 2**28  # bytes of a file of JSON lines: records, times, snapshots
DEEPEST = 16  # nesting of lists and mappings
LONGEST_REASON = 600  # characters of an error message
LARGEST = 2**63  # whole numbers are below it

DIGEST = "sha256"
"""The entry of a safetensors header that holds the SHA-256 of the file."""
_BLANK = "0" * 64
COMPACT: dict[str, Any] = {"separators": (",", ":")}
"""Options of `json.dumps` that leave out spaces."""
_MOST_HEADER = 2**27
_DAMAGED = "is damaged or is not a safetensors file"
_CLASS_KEYS = {"class_path", "init_args"}

KINDS = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    NoneType: "null",
    dict: "a JSON object",
    list: "a JSON array",
}


# ---------------------------------------------------------------------------------- bytes


def open_regular(path: Path, *, links: bool = False) -> BufferedReader:
    """Open a regular file for reading; `links` allows symbolic links, as in the Hub's cache."""
    with naming(path):
        if not links:
            require_regular(path)
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)  # a FIFO must not block us
        flags |= getattr(os, "O_BINARY", 0) | (0 if links else getattr(os, "O_NOFOLLOW", 0))
        handle = os.open(path, flags)
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            os.close(handle)
            raise ValueError(f"{path} is not a regular file")
        return open(handle, "rb")


def read_bytes(path: Path, most: int = MOST_JSON, *, links: bool = False) -> bytes:
    """The content of a regular file of at most `most` bytes."""
    with open_regular(path, links=links) as file, naming(path):
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"{path} has more than {most} bytes, the limit for such a file")
    return content


# ---------------------------------------------------------------------------------- JSON


def read_json(path: Path, *, links: bool = False) -> Any:
    """The value in a JSON file."""
    return parse_json(read_bytes(path, links=links), str(path))


def parse_json(content: bytes, where: str, *, nan: bool = False) -> Any:
    """The value of JSON text; `where` names the text in errors.

    Numbers that are not finite raise unless `nan`, for the records of a run that diverged.
    """
    try:
        value = json.loads(
            content.decode("utf-8"),
            parse_int=_whole,
            parse_float=None if nan else _finite,
            parse_constant=float if nan else _finite,
            object_pairs_hook=_mapping,
        )
        _check_content(value, DEEPEST)
    except RecursionError:
        raise ValueError(f"{where} is not usable: it is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {brief(error)}") from None
    except ValueError as error:
        raise ValueError(f"{where} is not usable: {brief(error)}") from None
    return value


def as_json(value: Any, where: str) -> Any:
    """The value that a JSON file of it would give back, with lists for tuples."""
    try:
        return parse_json(json.dumps(value).encode(), where)
    except TypeError as error:  # a Path, a number of numpy
        raise ValueError(f"{where} is not JSON: {error}") from error


def _whole(text: str) -> int:
    if len(text) > len(str(LARGEST)) + 1 or not -LARGEST <= int(text) < LARGEST:
        raise ValueError(f"the number {text[:20]}... has more than 64 bits")
    return int(text)


def _finite(text: str) -> float:
    value = float(text)
    if value - value != 0:
        raise ValueError(f"{text[:20]} is not a finite number")
    return value


def _mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the key {_shown(name)} is there twice")
        found[name] = value
    return found


def _check_content(value: Any, depth: int) -> None:
    """Raise for control characters, keys that could name a class, and deep nesting."""
    if isinstance(value, str) and not is_printable(value):
        raise ValueError(f"the text {_shown(value)} has control characters")
    if not isinstance(value, dict | list):
        return
    if depth == 0:
        raise ValueError("it is nested too deeply")
    if isinstance(value, dict):
        if named := sorted(_CLASS_KEYS & value.keys()):
            key = repr(named[0])
            raise ValueError(f"it has the key {key}, and a file must not name a class to make")
        value = [*value.keys(), *value.values()]
    for each in value:
        _check_content(each, depth - 1)


# ---------------------------------------------------------------------------------- schemas


def fit(value: Any, kind: Any, where: str) -> Any:
    """The value converted to the type `kind`, or a ValueError; `where` names the value in it.

    A dataclass is made from a mapping of its fields. A whole number is also a `float`; a bool is
    not an `int`. `dict[str, Any]` and `Any` accept every value that `parse_json` returns.
    """
    outer, inner = get_origin(kind), get_args(kind)
    if is_dataclass(kind) and isinstance(kind, type):
        return _fit_dataclass(value, kind, where)
    if outer in (Union, UnionType):
        for each in inner:
            with suppress(ValueError):
                return fit(value, each, where)
    if outer is dict and isinstance(value, dict):
        return {name: fit(each, inner[1], f"{where}.{name}") for name, each in value.items()}
    if outer is list and isinstance(value, list):
        return [fit(each, inner[0], f"{where}[{k}]") for k, each in enumerate(value)]
    is_choice = outer is Literal and isinstance(value, str) and value in inner
    is_number = kind is float and (type(value) is int or isinstance(value, float))
    if kind is Any or is_choice or is_number or type(value) is kind:
        return float(value) if is_number else value
    raise ValueError(f"{where} must be {expected(kind)}, not {_shown(value)}")


def _fit_dataclass(value: Any, kind: type[Any], where: str) -> Any:
    defaults = {each.name: (each.default, each.default_factory) for each in fields(kind)}
    needed = [name for name, default in defaults.items() if default == (MISSING, MISSING)]
    return kind(**fit_fields(value, hints_of(kind), where, needed=needed))


@cached
def hints_of(kind: type[Any]) -> dict[str, Any]:
    """The types of the fields of a class, evaluated once; not to be changed."""
    return get_type_hints(kind)


def fit_fields(
    value: Any, schema: Mapping[str, Any], where: str, *, needed: Iterable[str] | None = None
) -> dict[str, Any]:
    """A mapping with keys of `schema` and values of its types; other keys raise.

    All keys of the schema are `needed` by default.
    """
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be a JSON object, not {_shown(value)}")
    for name in value:
        if name not in schema:
            known = ", ".join(schema)
            raise ValueError(f"{where} has an unknown key {_shown(name)}; it can have {known}")
    for name in schema if needed is None else needed:
        if name not in value:
            raise ValueError(f"{where} lacks {name!r}")
    return {name: fit(each, schema[name], f"{where}: {name}") for name, each in value.items()}


def expected(kind: Any) -> str:
    """A type in words."""
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(dict.fromkeys(map(expected, get_args(kind))))
    if get_origin(kind) is Literal:
        return " or ".join(map(str, get_args(kind)))
    return KINDS.get(get_origin(kind) or kind, "a JSON object")


# ---------------------------------------------------------------------------------- text


def is_printable(text: str) -> bool:
    """Whether the text has no control characters: escapes, changes of direction."""
    return text.isprintable() or all(unicodedata.category(each) not in _CONTROL for each in text)


_CONTROL = ("Cc", "Cf", "Cs", "Zl", "Zp")


def printable(text: str, allowed: str = "") -> str:
    """The text with control characters escaped, so that a terminal does not interpret them."""
    if is_printable(text):
        return text
    signs = (each if each in allowed or is_printable(each) else ascii(each)[1:-1] for each in text)
    return "".join(signs)


def _shown(value: Any) -> str:
    """A value for an error message: short, on one line."""
    text = ascii(value) if isinstance(value, str) else printable(repr(value))
    return text if len(text) <= 60 else f"{text[:57]}..."


def brief(error: BaseException, most: int = LONGEST_REASON) -> str:
    """The first line of an error's message, of bounded length."""
    text = printable(str(error).partition("\n")[0])
    return text if len(text) <= most else f"{text[: most - 3]}..."


@contextmanager
def naming_file(path: Path) -> Iterator[None]:
    """Add the path to a ValueError about the content of a file."""
    try:
        yield
    except ValueError as error:
        if str(path) in str(error):
            raise
        raise ValueError(f"{path}: {brief(error)}") from error


# ---------------------------------------------------------------------------------- safetensors


class Sealed(NamedTuple):
    """The content of a safetensors file."""

    tensors: dict[str, "Tensor"]
    metadata: dict[str, str]
    """The metadata without the digest."""
    sealed: bool
    """Whether the file has a digest (a correct one: a wrong one raises)."""


def seal(tensors: Mapping[str, "Tensor"], metadata: Mapping[str, str]) -> bytes:
    """The bytes of a safetensors file whose header holds the SHA-256 of all of them.

    The digest is that of the file with 64 zeros in its place, so it covers the header (names,
    types, shapes, metadata) as well as the numbers.
    """
    from safetensors.torch import save

    if DIGEST in metadata:
        raise ValueError(f"the metadata of a model must not hold {DIGEST!r}")
    saved = save(dict(tensors))
    start = 8 + int.from_bytes(saved[:8], "little")
    entries = json.loads(saved[8:start])

    def header(digest: str) -> bytes:
        """The same bytes for the same content; safetensors itself varies the order of metadata."""
        values = {"__metadata__": {**metadata, DIGEST: digest}, **entries}
        content = json.dumps(values, **COMPACT).encode()
        content += b" " * (-len(content) % 8)
        return len(content).to_bytes(8, "little") + content

    digest = hashlib.sha256(header(_BLANK))
    digest.update(saved[start:])
    return header(digest.hexdigest()) + saved[start:]


def read_sealed(path: Path, *, tensors: bool = True, links: bool = False) -> Sealed:
    """The tensors and metadata of a safetensors file; a wrong digest raises."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    if not path.exists() and not path.is_symlink():
        raise ValueError(f"{path}: there is no such file")
    with open_regular(path, links=links) as file, naming(path):
        metadata, content = _verified(path, file, keep=tensors)
    sealed = metadata.pop(DIGEST, None) is not None
    try:
        found = load(content) if tensors else {}
        # in the same order in every process, which may communicate for each; cloned, because
        # PyTorch rounds differently on memory that is not aligned
        return Sealed({name: found[name].clone() for name in sorted(found)}, metadata, sealed)
    except (SafetensorError, OSError, RuntimeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} {_DAMAGED}: {brief(error)}") from None


def _verified(path: Path, file: BufferedReader, *, keep: bool) -> tuple[dict[str, str], bytes]:
    """The metadata of a file with a correct digest or none; with `keep`, also its bytes.

    The caller makes tensors from these bytes, so from the ones that were verified.
    """
    start = file.read(8)
    length = int.from_bytes(start, "little")
    if len(start) < 8 or length > min(_MOST_HEADER, os.fstat(file.fileno()).st_size - 8):
        raise ValueError(f"{path} {_DAMAGED}: its header does not fit in it")
    header = file.read(length)
    try:
        values = json.loads(header)
        metadata = fit(values.get("__metadata__", {}), dict[str, str], "__metadata__")
    except (ValueError, AttributeError, RecursionError):
        raise ValueError(f"{path} {_DAMAGED}: its header is not JSON") from None
    pieces, digest = [start, header], None
    if (stored := metadata.get(DIGEST)) is not None:
        mark = f'"{DIGEST}":"{stored}"'.encode()
        if not re.fullmatch(r"[0-9a-f]{64}", stored) or header.count(mark) != 1:
            raise ValueError(f"{path} is damaged: its header holds no SHA-256")
        digest = hashlib.sha256(start + header.replace(stored.encode(), _BLANK.encode(), 1))
    while piece := file.read(2**20) if keep or digest else b"":
        if digest is not None:
            digest.update(piece)
        if keep:
            pieces.append(piece)
    if digest is not None and digest.hexdigest() != stored:
        raise ValueError(f"{path} is damaged: its SHA-256 is not the one in its header")
    return dict(metadata), b"".join(pieces) if keep else b""


# ---------------------------------------------------------------------------------- trust


def is_ours(import_path: str) -> bool:
    """Whether an import path names a public part of dlrnn."""
    first, *others = import_path.split(".")
    return first == "dlrnn" and bool(others) and not any(each.startswith("_") for each in others)


def check_import(import_path: str, where: str | Path, *, trust: bool) -> None:
    """Raise for a class outside of dlrnn that a file names: importing a module runs its code."""
    if not (trust or is_ours(import_path)):
        raise ValueError(
            f"{where} names the class {printable(import_path)!r}, and importing it runs code"
            " outside of dlrnn; if you trust it, say --trust (in Python: trust=True)"
        )


def user_import(load: Callable[[], Any]) -> Any:
    """Import a class that the user named; the current folder is last on the import path."""
    with suppress(OSError):  # the folder may not exist any more
        here = os.getcwd()
        if here not in sys.path:
            sys.path.append(here)
    return load()


def imported(path: str, what: str) -> Any:
    """The object at `path`, MODULE.NAME; errors begin with `what`, "the task 'my_tasks.Forecast'".

    Modules outside of dlrnn are found in the current folder, too.
    """
    module, _, attribute = path.rpartition(".")
    try:
        load = partial(import_module, module)
        return getattr(load() if is_ours(path) else user_import(load), attribute)
    except Exception as error:  # a user's module may raise anything
        reason = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, ModuleNotFoundError):
            reason += " in this folder or PYTHONPATH"
        raise ValueError(f"{what} cannot be imported: {reason}") from error
