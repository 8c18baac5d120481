"""Import ListOps, Pathfinder and Path-X from the Long Range Arena's release.

ListOps: `basic_{train,val,test}.tsv`, with the columns Source and Target.

Pathfinder: `pathfinder32/curv_contour_length_14/imgs/K/sample_N.png` (Path-X: `pathfinder128`), and
`metadata/K.npy` with a row for each image: folder, file, number, label, and drawing parameters. In
the release these are lines of text in spite of the suffix; the original program writes arrays of
strings. Both are accepted. 80% of the images are for training, 10% for validation, 10% for testing.
LRA splits them in the unknown order of TFDS; this is the split of S4's loader, which S4, S4D and
later work report: a permutation by torch, with seed 42, of the rows of the metadata.
"""

import io
import re
from collections.abc import Generator, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import torch
from PIL import Image

from dlrnn.tasks import listops, pathfinder
from dlrnn.tasks.listops.generator import SCHEMA
from dlrnn.tasks.storage.archives import entries, split_files, text_lines
from dlrnn.tasks.storage.specs import ImportedSet, Row, Sample

# ---------------------------------------------------------------------------------- ListOps

_TREES = re.compile(r"(?:.*/)?basic_(train|val|test)\.tsv")
_SPLITS = {"train": "train", "val": "validation", "test": "test"}
_MAX_TOKENS = 2000  # of an expression


def listops_release() -> ImportedSet:
    """Return the data set of LRA's expressions; their targets are verified."""
    return ImportedSet(
        name="listops",
        parameters={**listops.lra().parameters, "release": "LRA"},
        rows=_expressions,
        schema=pa.schema([SCHEMA.field(name) for name in ("tokens", "label")]),
        layout="basic_{train,val,test}.tsv",
        shard_rows=2**13,
        writer={"use_dictionary": ["label"]},
    )


def _expressions(path: Path) -> Iterator[Row]:
    for split, entry in split_files(path, _TREES, _SPLITS):
        where = entry.where
        lines = (line.rstrip("\r\n").split("\t") for line in text_lines(entry))
        header = next(lines, [])
        if sorted(header) != ["Source", "Target"]:
            raise ValueError(f"{where} begins with {header[:4]}, not with Source and Target")
        for number, cells in enumerate(lines, start=2):
            if len(cells) != 2:
                raise ValueError(f"{where} line {number} has {len(cells)} columns, not 2")
            row = dict(zip(header, cells, strict=True))
            yield split, _tree(f"{where} line {number}", row["Source"], row["Target"])


def _tree(where: str, source: str, target: str) -> Sample:
    try:
        value, tokens = listops.evaluate(source), listops.from_text(source)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    if target != str(value):
        raise ValueError(f"{where} has the label {target[:40]!r}; its value is {value}")
    if len(tokens) > _MAX_TOKENS:
        raise ValueError(f"{where} has {len(tokens)} tokens; at most {_MAX_TOKENS} were expected")
    return {"tokens": tokens, "label": value}


# ---------------------------------------------------------------------------------- Pathfinder

_FILE = re.compile(r"(?:(.*)/)?curv_contour_length_14/(imgs/\d+/[^/.][^/]*\.png|metadata/\d+\.\w+)")
_LABEL = 3  # its index in a row of metadata
_SEED = 42
_LARGEST = {"metadata": 2**26, "imgs": 2**20}  # bytes
_ROWS = 2**20  # of a file of metadata


def images_release(like: pathfinder.PathfinderGenerator) -> ImportedSet:
    """Return the data set of LRA's images that are like generated ones."""
    fields = [like.schema.field(name) for name in ("image", "label")]
    folder = f"pathfinder{like.resolution}/curv_contour_length_14"
    return ImportedSet(
        name=like.name,
        parameters={"resolution": like.resolution, "release": "LRA"},
        rows=partial(_labelled, resolution=like.resolution),
        schema=pa.schema([*fields, pa.field("file", pa.string(), False)]),
        layout=f"{folder}/{{imgs/K/sample_N.png,metadata/K.npy}}",
        shard_rows=like.shard_rows,
        group_rows=like.group_rows,
        writer=like.writer,
    )


def _labelled(path: Path, resolution: int) -> Generator[Row, None, str | None]:
    """Yield images with their labels; the files are read twice, first for the labels."""
    rows: dict[int, list[tuple[str, int]]] = {}
    for name, where, data in _files(path, resolution, "metadata"):
        number = int(name.split("/")[1].partition(".")[0])
        if number in rows:
            raise ValueError(f"{where} occurs twice")
        rows[number] = list(read_metadata(where, data))
    images = [row for number in sorted(rows) for row in rows[number]]
    places = split_images(images)
    if len(places) != len(images):
        raise ValueError(f"{path}: the metadata name an image more than once")
    del rows, images
    unlabelled = 0
    for name, where, data in _files(path, resolution, "imgs"):
        if name not in places:
            unlabelled += 1
            continue
        split, label = places.pop(name)
        yield split, {"image": read_pixels(where, data, resolution), "label": label, "file": name}
    if places:
        raise ValueError(f"{path}: {next(iter(places))} is in the metadata but missing")
    return f"left out: {unlabelled} images without metadata" if unlabelled else None


def split_images(images: list[tuple[str, int]]) -> dict[str, tuple[str, int]]:
    """Return the split and the label of each file."""
    held_out = len(images) // 10
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(_SEED)).tolist()
    train = len(images) - 2 * held_out
    splits = ["train"] * train + ["validation"] * held_out + ["test"] * held_out
    return {images[k][0]: (split, images[k][1]) for k, split in zip(order, splits, strict=True)}


def _files(path: Path, resolution: int, kind: str) -> Iterator[tuple[str, str, bytes]]:
    """Yield name (from `imgs` or `metadata` on), location and content of files of a kind."""
    for entry in entries(path):
        found = _FILE.fullmatch(entry.name)
        if found is None or not found[2].startswith(kind):
            continue
        size = re.search(r"pathfinder(\d+)", found[1] or "")
        if size is not None and int(size[1]) != resolution:
            continue
        yield found[2], entry.where, entry.read(_LARGEST[kind])


def read_metadata(where: str, data: bytes) -> Iterator[tuple[str, int]]:
    """Yield the file and the label of each row; errors begin with `where`."""
    for number, row in enumerate(metadata_rows(where, data), start=1):
        if number > _ROWS:
            raise ValueError(f"{where} has more than {_ROWS} rows")
        if len(row) <= _LABEL:
            raise ValueError(f"{where} row {number} has {len(row)} entries; the label is the 4th")
        folder, name, label = row[0], row[1], row[_LABEL]
        if label not in ("0", "1"):
            raise ValueError(f"{where} row {number} has the label {label[:40]!r}; expected 0 or 1")
        yield f"{folder}/{name}", int(label)


def metadata_rows(where: str, data: bytes) -> Iterator[list[str]]:
    """Yield the entries of each row up to the label, and the rest of a line as one more."""
    try:
        if not data.startswith(b"\x93NUMPY"):
            for line in io.BytesIO(data):
                yield line.decode().split(maxsplit=_LABEL + 1)
            return
        array = np.load(io.BytesIO(data), allow_pickle=False)
        found = f"{array.dtype} {array.shape}"
        is_table = array.ndim == 2 and array.dtype.kind in "US" and array.dtype.itemsize > 0
        for row in array[:, : _LABEL + 1] if is_table else ():
            yield row.astype(str).tolist()
    except Exception:  # numpy raises many kinds of errors for a damaged header or text
        raise ValueError(f"{where} is neither text nor an array of strings") from None
    if not is_table:
        raise ValueError(f"{where} is not a table of strings: {found}")


def read_pixels(where: str, data: bytes, resolution: int) -> bytes:
    """Return the gray pixels of a PNG file, row by row from the top; errors begin with `where`."""
    try:
        with Image.open(io.BytesIO(data), formats=["PNG"]) as image:
            size = image.size
            pixels = image.convert("L").tobytes() if size == (resolution, resolution) else b""
    except Exception:  # Pillow raises IndexError, struct.error, zlib.error and others
        raise ValueError(f"{where} is damaged or not PNG") from None
    if not pixels:
        expected = f"{resolution} x {resolution} were expected"
        raise ValueError(f"{where} is {size[0]} x {size[1]} pixels; {expected}")
    return pixels
