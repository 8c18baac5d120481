"""Results folders of other people: what cannot be shown is one sentence, the rest is shown."""

import io
import json
import os
import shutil
import struct
import unicodedata
import zlib
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hostile import bounded_memory, deadline, run_command, tree
from PIL import Image

import made_up
from dlrnn.paper.records import parse_record
from dlrnn.paper.results import PNG, Collected, read_picture, read_results
from dlrnn.paper.store import add
from dlrnn.report.site import write_site
from dlrnn.report.templates import MOST_PROBLEMS

pytestmark = pytest.mark.usefixtures("unchecked")

RECIPE = made_up.SHIFT
RECORD = made_up.record(value=0.875)
CURVE = {"validation R2": [(20000, 0.5), (40000, 0.875)]}
FILES = (
    *("records.jsonl", "notes.json", "step-times.json", f"curves/{RECORD.stem}.csv"),
    *(f"breakdowns/{RECORD.stem}.json", f"pictures/{RECORD.stem}.png"),
    *(f"snapshots/{RECORD.stem}.jsonl",),
)


def collected(record):
    return Collected([record], {"curves": CURVE})


def picture():
    content = io.BytesIO()
    Image.new("L", (8, 8)).save(content, "PNG")
    return content.getvalue()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Two seeds: files of the first are made hostile, the second must be shown."""
    folder = tmp_path_factory.mktemp("made") / "results"
    add([collected(replace(RECORD, seed=seed)) for seed in (0, 1)], folder)
    for name in FILES[4:]:
        (folder / name).parent.mkdir(exist_ok=True)
    (folder / FILES[1]).write_text(json.dumps({RECIPE: "a finding"}))
    (folder / FILES[5]).write_bytes(picture())
    return folder


@pytest.fixture
def results(made, tmp_path):
    return Path(shutil.copytree(made, tmp_path / "results"))


def read(folder):
    with bounded_memory(), deadline(10):
        return read_results(folder, "ours")


def problem(folder, *words):
    """The one sentence of what cannot be read."""
    found = read(folder).problems
    [said] = [each for each in found if all(word in each for word in words)]
    assert "\n" not in said
    assert len(said) < 500
    assert len(found) == 1, found
    return said


def report(folder, **options):
    command = ["report", "--results", folder, "--out", folder.parent / "site"]
    return run_command(command, **options)


def test_valid_results_are_read(results):
    """Without this, every refusal below could be of something else."""
    found = read(results)
    assert (found.problems, len(found.records), len(found.curves)) == ([], 2, 2)
    assert (len(found.pictures), found.notes) == (1, {RECIPE: "a finding"})


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ["pipe", "device", "link", "folder", "loop"])
def test_a_special_file_is_one_problem(name, kind, results, tmp_path):
    path = results / name
    secret = tmp_path / "secret"
    secret.write_bytes(path.read_bytes() if path.is_file() else b"{}")
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to({"device": "/dev/zero", "link": secret, "loop": path}[kind])
    said = problem(results, str(path))
    assert "cannot be read" in said
    if name == "records.jsonl":
        assert read(results).records == []


@pytest.mark.parametrize("name", ["curves", "breakdowns", "pictures", "snapshots"])
def test_a_linked_folder_is_not_read(name, results, tmp_path):
    (results / name).rename(tmp_path / "elsewhere")
    (results / name).symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    assert "is a symbolic link" in problem(results, str(results / name))


@pytest.mark.parametrize(
    ("place", "content"),
    [
        (3, b"step,validation R2\n1," + b"a" * 200_000),
        (3, b"step," + b"b" * 200_000),
        (3, b'step,"' + b"\n" * 200_000),
        (3, b"step,a\n" + b"9" * 5000 + b",1"),
        (3, b"\xff\xfe"),
        (3, b"step,a\n\x00,1"),
        (3, b" " * (2**22 + 1)),
        (1, b"[" * 200_000),
        (1, b"{" * 200_000),
        (1, json.dumps({RECIPE: "\x1b[31m"}).encode()),
        (1, json.dumps({RECIPE: ["a"]}).encode()),
        (1, b" " * (2**24 + 1)),
        (2, b'{"device": "a", "torch": "b", "models": [[]]}'),
        (4, b"[" * 200_000),
        (4, b'{"by height": [{"height": 1, "nodes": 1, "error": 2}]}'),
        (4, b'{"by height": [], "by operator": [{"operator": "\\u001b", "nodes": 1, "error": 0}]}'),
        (6, b"[" * 200_000),
        (6, b'{"step": 1, "length": 1, "layers": [{"name": "\\u001b"}]}'),
    ],
)
def test_hostile_content_is_one_problem(place, content, results):
    path = results / FILES[place]
    path.write_bytes(content)
    problem(results, str(path), "cannot be read")


CONTROL = ("\x1b[31m", "\x9b", "\u202e", "a\rb", "\ud800", "\x00")


@pytest.mark.parametrize("mark", CONTROL)
@pytest.mark.parametrize("name", ["variant", "metric", "note", "hardware", "command", "versions"])
def test_control_characters_in_a_record_are_one_problem(mark, name, results):
    value = {mark: "1"} if name == "versions" else f"a{mark}"
    append(results, {"seed": 2, name: value})
    assert f"'{name}' with control characters" in problem(results, "records.jsonl, line 3")
    assert len(read(results).records) == 2


def test_no_page_has_control_characters(results):
    for place, mark in enumerate(CONTROL):
        append(results, {"seed": place + 2, "variant": mark, "recipe": f"table1/shift/{mark}"})
    (results / "notes.json").write_text(json.dumps({"table1/x\x1b/y": "\x1b[31m"}))
    told = report(results)
    assert told.status == 0, told
    assert not told.faults()
    for page in (results.parent / "site").rglob("*.html"):
        raw = {each for each in page.read_text() if unicodedata.category(each) in ("Cc", "Cf")}
        assert raw <= {"\n", "\t"}, page
    assert "0.875" in (results.parent / "site" / "table1.html").read_text()


def append(folder, *changes):
    with open(folder / "records.jsonl", "a") as file:
        for each in changes:
            file.write(json.dumps({**asdict(RECORD), **each}) + "\n")


@pytest.mark.parametrize("name", ["variant", "recipe"])
def test_names_too_long_for_files_are_one_problem(name, results):
    long = f"table1/{'x' * 300}/y" if name == "recipe" else "x" * 300
    append(results, {name: long})
    assert "letters, and names of files have at most" in problem(results, "records.jsonl, line 3")
    assert report(results).status == 0


@pytest.mark.parametrize(
    "change",
    [
        {"value": 10**400},
        {"value": 2**53 + 1},
        {"value": [1]},
        {"value": {}},
        {"seed": None},
        {"seed": 2**70},
        {"seed": 0.5},
        {"steps": True},
        {"versions": []},
        {"versions": {"a": None}},
        {"versions": {"a": {"b": {}}}},
        {"variant": None},
        {"commit": 5},
        {"version": []},
        {"version": 2**60},
        {"": 1},
        {"k" * 10_000: 1},
        {"recipe": "table1/" + "x" * 10_000},
        {"split": "y" * 10_000},
    ],
    ids=lambda change: str(change)[:30],
)
def test_hostile_values_in_a_record_are_one_problem(change, results):
    append(results, change)
    problem(results, "records.jsonl, line 3")


def test_a_deeply_nested_record_is_one_problem(results):
    with open(results / "records.jsonl", "a") as file:
        file.write("[" * 200_000 + "\n")
    assert "is not JSON" in problem(results, "records.jsonl, line 3")


def test_many_records_of_one_cell_take_bounded_time(results):
    append(results, *({"seed": seed} for seed in range(2, 10_000)))
    with deadline(10), bounded_memory():
        found = read_results(results, "ours")
        said = write_site(results.parent / "site", [found], results / "none")
    assert len(said) == 9_998, "a curve is missing of each"
    page = (results.parent / "site" / "speed.html").read_text()
    assert f"and {9_998 - MOST_PROBLEMS} more" in page


def test_columns_of_a_table_are_bounded(results):
    append(results, *({"variant": f"v{k}"} for k in range(1000)))
    assert len([each for each in read(results).problems if "are left out" in each]) == 1
    append(results, *({"recipe": f"table1/shift/v{k}"} for k in range(3000)))
    assert report(results).status == 0


# ---------------------------------------------------------------------------------- pictures


def png(width, height, rows=b""):
    def chunk(name, data):
        return (
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        )

    head = struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0)
    body = zlib.compress(rows or b"\0" * (4 * width + 1) * height)
    return PNG + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def test_a_picture_with_too_many_pixels_is_one_problem(results):
    """650 MB decoded."""
    (results / FILES[5]).write_bytes(png(13_000, 13_056, rows=b"\0"))
    assert "13000 x 13056 pixels" in problem(results, FILES[5])
    assert read_picture(png(9, 7))
    for broken in (PNG, PNG + b"\0" * 100, png(2**31 - 1, 2**31 - 1, b"\0"), png(9, 7)[:40]):
        with pytest.raises(ValueError, match=r"PNG|pixels"), bounded_memory():
            read_picture(broken)


# ---------------------------------------------------------------------------------- adding


@pytest.mark.parametrize("kind", ["pipe", "device", "link"])
def test_records_are_not_added_to_a_special_file(kind, results, tmp_path):
    (tmp_path / "outside").mkdir()
    path = results / "records.jsonl"
    shutil.copy(path, tmp_path / "outside" / "records.jsonl")
    before = tree(tmp_path / "outside")
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero" if kind == "device" else tmp_path / "outside/records.jsonl")
    with pytest.raises(ValueError, match=r"records\.jsonl"), deadline(5), bounded_memory():
        add([collected(RECORD)], results)
    assert tree(tmp_path / "outside") == before


def test_a_pipe_in_place_of_a_curve_is_replaced(results):
    path = results / FILES[3]
    path.unlink()
    os.mkfifo(path)
    new = replace(RECORD, steps=50, steps_asked=50, value=0.5)
    with deadline(5):
        add([collected(new)], results, replace=True)
    assert path.read_text().startswith("step,")


def test_a_record_that_could_not_be_read_again_is_not_added(results):
    for change in ({"note": "\x1b[31m"}, {"variant": "x" * 300}):
        made = replace(RECORD, seed=7, **change)
        [said] = add([collected(made)], results)
        assert "left out: its record has" in said
    assert read(results).problems == []
    several = replace(RECORD, seed=7, note="two\nlines")
    assert parse_record(several.to_line()) == several


def test_a_site_is_written_beside_a_pipe(results):
    (results.parent / "site" / "layers").mkdir(parents=True)
    os.mkfifo(results.parent / "site" / "layers" / "old.js")
    assert report(results).status == 0
