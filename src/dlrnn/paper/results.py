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
import os
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from PIL import Image

from dlrnn.common import untrusted
from dlrnn.common.files import require_own_folder
from dlrnn.common.untrusted import brief, fit, parse_json, read_bytes
from dlrnn.paper.recipes import RECIPES
from dlrnn.paper.records import LARGEST, Record, parse_record
from dlrnn.paper.snapshots import check_snapshot

RECORDS, NOTES, STEP_TIMES = "records.jsonl", "notes.json", "step-times.json"
CURVES, BREAKDOWNS, PICTURES, SNAPSHOTS = "curves", "breakdowns", "pictures", "snapshots"
STEP_COLUMNS = ("L ms", "L", "L paper", "2L ms", "2L", "2L paper")
TABLE3_COLUMNS = ("ms", "relative", "paper")
"""The numbers of a model in step-times.json, for Tables 1 and 6, and for Table 3."""
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


def check_results(folder: Path) -> None:
    """Refuse a folder that holds no results."""
    advice = "--results takes what `dlrnn results add --into DIR` wrote"
    if not folder.exists():
        raise ValueError(f"there are no results in {folder}: it does not exist; {advice}")
    if not folder.is_dir():
        raise ValueError(f"there are no results in {folder}: it is not a folder; {advice}")
    if not (folder / RECORDS).is_file():
        raise ValueError(f"there are no results in {folder}: it has no {RECORDS}; {advice}")


def read_results(folder: str | Path, name: str) -> Results:
    """Read everything that can be read; a folder that does not exist has no results."""
    folder, found = Path(folder), Results(name)
    found.records = read_records(folder / RECORDS, found.problems)
    stems = dict.fromkeys(record.stem for record in found.records)
    found.curves = _files(
        folder / CURVES, "csv", stems, read_curve, found.problems, most=MOST_CURVE
    )
    for one in stems:
        if not os.path.lexists(folder / CURVES / f"{one}.csv"):
            found.problems.append(f"the curve {folder / CURVES / one}.csv is missing")
    found.breakdowns = _files(folder / BREAKDOWNS, "json", stems, read_breakdown, found.problems)
    found.pictures = _files(folder / PICTURES, "png", stems, read_picture, found.problems)
    for one, (read, broken) in _files(
        folder / SNAPSHOTS, "jsonl", stems, read_snapshots, found.problems
    ).items():
        found.snapshots[one] = read
        path = folder / SNAPSHOTS / f"{one}.jsonl"
        found.problems += [f"{path}, line {number}, is not a snapshot" for number in broken]
    found.notes = read_json(folder / NOTES, check_notes, found.problems, links=False) or {}
    known = RECIPES.keys() | {record.recipe for record in found.records}
    for other in sorted(found.notes.keys() - known):
        found.problems.append(f"{folder / NOTES} has a note on {other!r:.60}, which is no recipe")
    found.problems += _short_curves(found, folder)
    found.step_times = read_json(folder / STEP_TIMES, check_step_times, found.problems, links=False)
    return found


def _short_curves(found: Results, folder: Path) -> list[str]:
    """Report curves that end before their runs."""
    ends = {
        one: max((points[-1][0] for points in curve.values() if points), default=0)
        for one, curve in found.curves.items()
    }
    return [
        f"{folder / CURVES / record.stem}.csv ends at step {ends[record.stem]}, and its run has"
        f" {record.steps}"
        for record in {each.stem: each for each in found.records}.values()
        if record.stem in ends and ends[record.stem] < record.steps
    ]


def read_records(path: Path, problems: list[str]) -> list[Record]:
    """Every line that is a record; of two with the same key, the later one."""
    found: dict[tuple[str, str, int, str], Record] = {}
    columns: set[tuple[str, str]] = set()
    recipes: set[str] = set()
    try:
        lines = read_lines(path)
    except (ValueError, OSError) as error:
        problems.append(_unreadable(path, error))
        return []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = parse_record(line.decode(errors="replace"))
            columns.add((record.variant, record.settings))
            recipes.add(record.recipe)
            if len(columns) > MOST_COLUMNS or len(recipes) > MOST_RECIPES:
                most = f"{MOST_COLUMNS} variants and settings, and {MOST_RECIPES} recipes"
                problems.append(f"{path} has more than {most}: lines from {number} are left out")
                break
            found[record.key] = record
        except ValueError as error:
            problems.append(f"{path}, line {number}, {error}")
    return list(found.values())


def read_lines(path: Path) -> list[bytes]:
    """The lines of a file, empty ones included; [] if there is no file."""
    if not os.path.lexists(path):
        return []
    return read_bytes(path, MOST_RECORDS).removeprefix(BOM_UTF8).split(b"\n")


def read_json(
    path: Path, check: Callable[[Any], Content], problems: list[str], *, links: bool = True
) -> Content | None:
    """The checked content of a JSON file; None if there is no file, or it is a problem."""
    if not os.path.lexists(path):
        return None
    try:
        return check(untrusted.read_json(path, links=links))
    except UNREADABLE as error:
        problems.append(_unreadable(path, error))
        return None


def _unreadable(path: Path, error: Exception) -> str:
    """The problem with a file in a sentence, without Python's messages on unexpected values."""
    if not isinstance(error, ValueError | csv.Error):
        return f"{path} cannot be read"
    reason = brief(error, 200).removeprefix(f"{path}").lstrip(" :")
    return f"{path} cannot be read: {reason}"


def _files(
    folder: Path,
    ending: str,
    stems: Iterable[str],
    read: Callable[[bytes], Content],
    problems: list[str],
    *,
    most: int = MOST_FILE,
) -> dict[str, Content]:
    found: dict[str, Content] = {}
    try:
        require_own_folder(folder)
    except ValueError as error:
        problems.append(str(error))
        return found
    for one in stems:
        path = folder / f"{one}.{ending}"
        if os.path.lexists(path):
            try:
                found[one] = read(read_bytes(path, most))
            except UNREADABLE as error:
                problems.append(_unreadable(path, error))
    return found


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
    by_step: dict[int, dict[str, float]] = {}
    for name, points in curve.items():
        for step, value in points:
            by_step.setdefault(step, {})[name] = value
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["step", *curve])
    for step, values in sorted(by_step.items()):
        writer.writerow([step, *(f"{values[n]:.5g}" if n in values else "" for n in curve)])
    return text.getvalue().encode()


def thinned(items: Sequence[Item], most: int) -> list[Item]:
    """At most so many items, evenly chosen, with the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(k * (len(items) - 1) / (most - 1))] for k in range(most)]


def read_breakdown(content: bytes) -> dict[str, list[dict[str, Any]]]:
    """Parse errors by height and by operator, as `analysis.listops_errors` gives them."""
    return check_breakdown(parse_json(content, "it"))


def check_breakdown(values: Any) -> dict[str, list[dict[str, Any]]]:
    """The checked values of a breakdown, from JSON; other keys are dropped."""
    kinds: dict[str, Callable[[Any], Any]] = {"height": _height, "operator": str}
    return {
        f"by {key}": [
            {
                key: kind(row[key]),
                "nodes": int(row["nodes"]),
                "error": None if row["error"] is None else _share(row["error"]),
            }
            for row in values[f"by {key}"]
        ]
        for key, kind in kinds.items()
    }


def _finite(value: Any) -> float:
    if not abs(value) < 1e30:
        raise ValueError("a number is finite")
    return float(value)


def _height(value: Any) -> int:
    if not 0 <= value <= LARGEST:
        raise ValueError("a height is a count")
    return int(value)


def _share(value: Any) -> float:
    if not 0 <= value <= 1:
        raise ValueError("a share lies between 0 and 1")
    return float(value)


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


def check_notes(values: Any) -> dict[str, str]:
    """The findings by recipe, from JSON."""
    return dict(fit(values, dict[str, str], "it"))


def check_step_times(values: Any) -> dict[str, Any]:
    """The times of `bench step --tables`, from JSON; old files lack Table 3 and precisions."""
    rows = [
        {
            "model": str(row["model"]),
            "precision": str(row.get("precision", "fp32")),
            **{n: None if row[n] is None else _finite(row[n]) for n in STEP_COLUMNS},
        }
        for row in values["models"]
    ]
    higher = [
        {"task": str(row["task"]), "model": str(row["model"])}
        | {"precision": str(row.get("precision", "fp32"))}
        | {n: _finite(row[n]) for n in TABLE3_COLUMNS}
        for row in values.get("table3", ())
    ]
    where = {"device": str(values["device"]), "torch": str(values["torch"])}
    return {**where, "models": rows, "table3": higher}
