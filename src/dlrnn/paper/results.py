"""Measured results on disk: `results/`.

records.jsonl          a line for each number
curves/NAME.csv        losses and metrics by step
breakdowns/NAME.json   ListOps-SubTrees: errors by height and operator
pictures/NAME.png      Pathfinder-Segmentation: predictions
snapshots/NAME.jsonl   trained layers by step
notes.json             findings by recipe, written by hand
step-times.json        output of `dlrnn bench step --tables --json`

Files that cannot be read are reported in `problems`, one sentence each; the rest is read.
"""

import csv
import io
import json
import os
from codecs import BOM_UTF8
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from PIL import Image

from dlrnn.common.files import require_own_folder
from dlrnn.common.untrusted import COMPACT, brief, fit, parse_json, read_bytes
from dlrnn.paper.recipes import RECIPES
from dlrnn.paper.records import LARGEST, Record, parse_record
from dlrnn.paper.snapshots import check_snapshot

RECORDS, NOTES, STEP_TIMES = "records.jsonl", "notes.json", "step-times.json"
STEP_COLUMNS = ("L ms", "L", "L paper", "2L ms", "2L", "2L paper")
TABLE3_COLUMNS = ("ms", "relative", "paper")
"""The numbers of a model in step-times.json, for Tables 1 and 6, and for Tables 3 and 5."""
PNG = b"\x89PNG\r\n\x1a\n"

MOST_RECORDS, MOST_CURVE, MOST_FILE = 2**26, 2**22, 2**24
"""The most bytes of records.jsonl, of a curve and of any other file."""
MOST_CURVE_ENTRY = 1000
"""The most characters of a name or a number in a curve."""
MOST_PIXELS = 2**24
"""The most pixels of a picture."""
MOST_COLUMNS, MOST_RECIPES = 200, 2000
"""The most variants and settings, which become columns of tables, and the most recipes."""

Curve = dict[str, list[tuple[int, float]]]
"""By name ("train loss", "validation R2"): values by step."""

Content = TypeVar("Content")
Item = TypeVar("Item")
UNREADABLE = (
    *(ValueError, KeyError, IndexError, TypeError, AttributeError),
    *(OverflowError, RecursionError, OSError, csv.Error),
)
"""The errors that a file of the wrong content, or a folder in its place, can raise."""


@dataclass(frozen=True)
class Collected:
    """The results of one run: its records, and its other files by the names in `KINDS`."""

    records: list[Record]
    files: dict[str, Any]
    problems: list[str] = field(default_factory=list)
    """Problems with files that the numbers do not depend on, a sentence each."""

    @property
    def stem(self) -> str:
        """The name of its files without suffix."""
        return self.records[0].stem


@dataclass
class Results:
    """The results in a folder, or of some runs; files by the name of their run."""

    name: str
    records: list[Record] = field(default_factory=list)
    curves: dict[str, Curve] = field(default_factory=dict)
    breakdowns: dict[str, dict[str, list[dict[str, Any]]]] = field(default_factory=dict)
    pictures: dict[str, bytes] = field(default_factory=dict)
    snapshots: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    step_times: dict[str, Any] | None = None
    problems: list[str] = field(default_factory=list)

    def add_file(self, kind: str, stem: str, content: Any) -> None:
        """Add a file of one of the `KINDS`."""
        getattr(self, kind)[stem] = content


def check_results(folder: Path) -> None:
    """Refuse a folder that holds no results."""
    if (folder / RECORDS).is_file():
        return
    why = f"it has no {RECORDS}" if folder.is_dir() else "it is not a folder"
    why = why if folder.exists() else "it does not exist"
    advice = "--results takes what `dlrnn results add --into DIR` wrote"
    raise ValueError(f"there are no results in {folder}: {why}; {advice}")


def read_results(folder: str | Path, name: str) -> Results:
    """Read everything that can be read; a folder that does not exist has no results."""
    folder, found = Path(folder), Results(name)
    found.records = read_records(folder / RECORDS, found.problems)
    steps = {record.stem: record.steps for record in found.records}
    for kind, (suffix, read, _, most) in KINDS.items():
        try:
            require_own_folder(folder / kind)
        except ValueError as error:
            found.problems.append(str(error))
            continue
        for stem in steps:
            path = folder / kind / f"{stem}.{suffix}"
            content = read_file(path, read, found.problems, most)
            if kind == "snapshots" and content is not None:
                content, broken = content
                found.problems += broken_lines(path, broken)
            if content is not None:
                found.add_file(kind, stem, content)
            elif kind == "curves" and not os.path.lexists(path):
                found.problems.append(f"the curve {path} is missing")
    for stem, curve in found.curves.items():
        end = max((points[-1][0] for points in curve.values() if points), default=0)
        if end < steps[stem]:
            told = f"ends at step {end}, and its run has {steps[stem]}"
            found.problems.append(f"{folder / 'curves' / stem}.csv {told}")
    found.notes = read_file(folder / NOTES, _notes, found.problems) or {}
    known = RECIPES.keys() | {record.recipe for record in found.records}
    for other in sorted(found.notes.keys() - known):
        found.problems.append(f"{folder / NOTES} has a note on {other!r:.60}, which is no recipe")
    found.step_times = read_file(folder / STEP_TIMES, _step_times, found.problems)
    return found


def read_records(path: Path, problems: list[str]) -> list[Record]:
    """Every line that is a record; of two with the same key, the later one."""
    found: dict[tuple[str, str, int, str], Record] = {}
    columns: set[tuple[str, str]] = set()
    recipes: set[str] = set()
    lines = read_file(path, record_lines, problems, MOST_RECORDS) or []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = parse_record(line.decode(errors="replace"))
        except ValueError as error:
            problems.append(f"{path}, line {number}, {error}")
            continue
        columns.add((record.variant, record.settings))
        recipes.add(record.recipe)
        if len(columns) > MOST_COLUMNS or len(recipes) > MOST_RECIPES:
            most = f"{MOST_COLUMNS} variants and settings, and {MOST_RECIPES} recipes"
            problems.append(f"{path} has more than {most}: lines from {number} are left out")
            break
        found[record.key] = record
    return list(found.values())


def record_lines(content: bytes) -> list[bytes]:
    """The lines of records.jsonl, empty ones included."""
    return content.removeprefix(BOM_UTF8).split(b"\n")


def read_file(
    path: Path,
    read: Callable[[bytes], Content],
    problems: list[str],
    most: int = MOST_FILE,
    *,
    links: bool = False,
) -> Content | None:
    """The parsed content of a file; None if there is no file, or it is a problem."""
    if not os.path.lexists(path):
        return None
    try:
        return read(read_bytes(path, most, links=links))
    except UNREADABLE as error:
        reason = ""  # Python's messages on unexpected values say nothing to a user
        if isinstance(error, ValueError | csv.Error):
            reason = ": " + brief(error, 200).removeprefix(f"{path}").lstrip(" :")
        problems.append(f"{path} cannot be read{reason}")
        return None


def broken_lines(path: Path, numbers: Sequence[int]) -> list[str]:
    """The problems with lines of snapshots."""
    return [f"{path}, line {number}, is not a snapshot" for number in numbers]


def thinned(items: Sequence[Item], most: int) -> list[Item]:
    """At most so many items, evenly chosen, with the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(k * (len(items) - 1) / (most - 1))] for k in range(most)]


# ---------------------------------------------------------------------------- kinds of files


def read_curve(content: bytes) -> Curve:
    """Parse the output of `curve_bytes`."""
    lines = list(csv.reader(io.StringIO(content.decode())))
    if any(len(entry) > MOST_CURVE_ENTRY for line in lines for entry in line):
        raise ValueError(f"an entry of a curve has more than {MOST_CURVE_ENTRY} characters")
    if not lines or lines[0][:1] != ["step"]:
        raise ValueError("a curve begins with its steps")
    head, *rows = lines
    curve: Curve = {}
    for place, name in enumerate(head[1:], start=1):
        known = [(int(row[0]), float(row[place])) for row in rows if row[place] != ""]
        curve[name] = [(step, v) for step, v in known if abs(v) < 1e30 and 0 <= step <= LARGEST]
    return curve


def curve_bytes(curve: Curve) -> bytes:
    """A curve as CSV: a line for each step, a column for each name, empty without a value."""
    by_step: dict[int, dict[str, str]] = {}
    for name, points in curve.items():
        for step, value in points:
            by_step.setdefault(step, {})[name] = f"{value:.5g}"
    text = io.StringIO()
    writer = csv.DictWriter(text, ["step", *curve], lineterminator="\n")
    writer.writeheader()
    writer.writerows({"step": step, **by_step[step]} for step in sorted(by_step))
    return text.getvalue().encode()


def read_breakdown(content: bytes) -> dict[str, list[dict[str, Any]]]:
    """Parse errors by height and by operator, as `analysis.listops_errors` gives them."""
    return check_breakdown(parse_json(content, "it"))


def check_breakdown(values: Any) -> dict[str, list[dict[str, Any]]]:
    """The checked values of a breakdown, from JSON; other keys are dropped."""
    found: dict[str, list[dict[str, Any]]] = {}
    for key, kind in (("height", int), ("operator", str)):
        schema = {key: kind, "nodes": int, "error": float | None}
        rows = [
            {name: fit(row[name], of, name) for name, of in schema.items()}
            for row in values[f"by {key}"]
        ]
        if not all(row["error"] is None or 0 <= row["error"] <= 1 for row in rows):
            raise ValueError("a share lies between 0 and 1")
        if key == "height" and not all(0 <= row["height"] <= LARGEST for row in rows):
            raise ValueError("a height is a count")
        found[f"by {key}"] = rows
    return found


def _breakdown_bytes(values: dict[str, list[dict[str, Any]]]) -> bytes:
    return (json.dumps(values, indent=1) + "\n").encode()


def read_picture(content: bytes) -> bytes:
    """Check that a picture is a complete PNG of at most MOST_PIXELS."""
    if not content.startswith(PNG):
        raise ValueError("a picture is a PNG")
    width, height = (int.from_bytes(content[place : place + 4]) for place in (16, 20))  # IHDR
    if width * height > MOST_PIXELS:
        raise ValueError(f"{width} x {height} pixels are more than the {MOST_PIXELS} of a picture")
    try:
        with Image.open(io.BytesIO(content), formats=["PNG"]) as image:
            if image.size != (width, height):
                raise ValueError("its two sizes differ")
            image.load()
    except Exception as error:  # Pillow raises SyntaxError, struct.error, zlib.error and others
        raise ValueError("a picture is a PNG") from error
    return content


def read_snapshots(content: bytes) -> tuple[list[dict[str, Any]], list[int]]:
    """Snapshots by step, and the numbers of lines that cannot be read, from 1."""
    found, broken = {}, []
    for number, line in enumerate(content.decode("utf-8", "replace").splitlines(), start=1):
        try:
            taken = check_snapshot(parse_json(line.encode(), "it", nan=True))
        except UNREADABLE:
            broken.append(number)
            continue
        found[taken["step"]] = taken
    if not found:
        raise ValueError("there is no snapshot in it")
    return [found[step] for step in sorted(found)], broken


def _snapshot_bytes(snapshots: Sequence[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(each, **COMPACT) + "\n" for each in snapshots).encode()


class Kind(NamedTuple):
    """Files of runs in a folder of their own, NAME.suffix: how they are read and written."""

    suffix: str
    read: Callable[[bytes], Any]
    write: Callable[[Any], bytes]
    most: int = MOST_FILE


KINDS = {
    "curves": Kind("csv", read_curve, curve_bytes, MOST_CURVE),
    "breakdowns": Kind("json", read_breakdown, _breakdown_bytes),
    "pictures": Kind("png", read_picture, bytes),
    "snapshots": Kind("jsonl", read_snapshots, _snapshot_bytes),
}


def _notes(content: bytes) -> dict[str, str]:
    """The findings by recipe."""
    return dict(fit(parse_json(content, "it"), dict[str, str], "it"))


def _step_times(content: bytes) -> dict[str, Any]:
    return check_step_times(parse_json(content, "it"))


def check_step_times(values: Any) -> dict[str, Any]:
    """The times of `bench step --tables`, from JSON; old files lack Tables 3 and 5, precisions."""
    rows = [_step_row(row, ("model",), STEP_COLUMNS) for row in values["models"]]
    higher = [_step_row(row, ("task", "model"), TABLE3_COLUMNS) for row in values.get("table3", ())]
    where = {"device": str(values["device"]), "torch": str(values["torch"])}
    language = [_step_row(row, ("model",), TABLE3_COLUMNS) for row in values.get("table5", ())]
    return {**where, "models": rows, "table3": higher, "table5": language}


def _step_row(row: Any, texts: Sequence[str], numbers: Sequence[str]) -> dict[str, Any]:
    found = {name: str(row[name]) for name in texts}
    found["precision"] = str(row.get("precision", "fp32"))
    return found | {name: _finite(row[name]) for name in numbers}


def _finite(value: Any) -> float | None:
    if value is not None and not abs(value) < 1e30:
        raise ValueError("a number is finite")
    return None if value is None else float(value)
