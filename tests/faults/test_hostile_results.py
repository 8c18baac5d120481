"""Results folders of other people: what cannot be shown is one sentence, the rest is shown."""

import io
import json
import os
import shutil
import struct
import zlib
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from damage import plant, tree
from harness import guarded, is_control, refusal, run_command
from PIL import Image

import made_up
from dlrnn.paper.records import parse_record
from dlrnn.paper.results import PNG, Collected, read_picture, read_results
from dlrnn.paper.store import add
from dlrnn.report.site import write_site
from dlrnn.report.templates import MOST_PROBLEMS

RECIPE = made_up.SHIFT
RECORD = made_up.record(value=0.875)
STEM = RECORD.stem
CURVE, BREAKDOWN, SNAPSHOTS = (
    f"curves/{STEM}.csv",
    f"breakdowns/{STEM}.json",
    f"snapshots/{STEM}.jsonl",
)
PICTURE = f"pictures/{STEM}.png"
FILES = ("records.jsonl", "notes.json", "step-times.json", CURVE, BREAKDOWN, PICTURE, SNAPSHOTS)


def collected(**changed):
    curve = {"validation R2": [(20000, 0.5), (40000, 0.875)]}
    return Collected([replace(RECORD, **changed)], {"curves": curve})


@pytest.fixture(scope="module")
def two_seeds(tmp_path_factory):
    """Files of the first seed are made hostile, the second must be shown."""
    folder = tmp_path_factory.mktemp("made") / "results"
    add([collected(seed=seed) for seed in (0, 1)], folder)
    for name in (BREAKDOWN, PICTURE, SNAPSHOTS):
        (folder / name).parent.mkdir(exist_ok=True)
    (folder / "notes.json").write_text(json.dumps({RECIPE: "a finding"}))
    content = io.BytesIO()
    Image.new("L", (8, 8)).save(content, "PNG")
    (folder / PICTURE).write_bytes(content.getvalue())
    return folder


@pytest.fixture
def results(two_seeds, tmp_path):
    return Path(shutil.copytree(two_seeds, tmp_path / "results"))


def append(folder, *changes):
    with open(folder / "records.jsonl", "a") as file:
        for each in changes:
            file.write(json.dumps({**asdict(RECORD), **each}) + "\n")


def read(folder):
    with guarded():
        return read_results(folder, "ours")


def assert_problem(folder, *words):
    """What cannot be read is one sentence."""
    [said] = read(folder).problems
    assert all(word in said for word in words), said
    assert "\n" not in said
    assert len(said) < 500


def report(folder):
    return run_command(["report", "--results", folder, "--out", folder.parent / "site"])


def test_valid_results_are_read(results):
    """Without this, every refusal below could be of something else."""
    found = read(results)
    assert (found.problems, len(found.records), len(found.curves)) == ([], 2, 2)
    assert (len(found.pictures), found.notes) == (1, {RECIPE: "a finding"})


# ---------------------------------------------------------------------------------- files


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ["pipe", "device", "link", "folder", "loop"])
def test_a_special_file_is_one_problem(name, kind, results, tmp_path):
    path, secret = results / name, tmp_path / "secret"
    secret.write_bytes(path.read_bytes() if path.is_file() else b"{}")
    plant(path, kind, secret)
    assert_problem(results, str(path), "cannot be read")
    if name == "records.jsonl":
        assert read(results).records == []


@pytest.mark.parametrize("name", ["curves", "breakdowns", "pictures", "snapshots"])
def test_a_linked_folder_is_not_read(name, results, tmp_path):
    (results / name).rename(tmp_path / "elsewhere")
    (results / name).symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    assert_problem(results, str(results / name), "is a symbolic link")


OPERATORS = b'{"by height": [], "by operator": [{"operator": "\\u001b", "nodes": 1, "error": 0}]}'


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (CURVE, b"step,validation R2\n1," + b"a" * 200_000),
        (CURVE, b"step," + b"b" * 200_000),
        (CURVE, b'step,"' + b"\n" * 200_000),
        (CURVE, b"step,a\n" + b"9" * 5000 + b",1"),
        (CURVE, b"\xff\xfe"),
        (CURVE, b"step,a\n\x00,1"),
        (CURVE, b" " * (2**22 + 1)),
        ("notes.json", b"[" * 200_000),
        ("notes.json", b"{" * 200_000),
        ("notes.json", json.dumps({RECIPE: "\x1b[31m"}).encode()),
        ("notes.json", json.dumps({RECIPE: ["a"]}).encode()),
        ("notes.json", b" " * (2**24 + 1)),
        ("step-times.json", b'{"device": "a", "torch": "b", "models": [[]]}'),
        (BREAKDOWN, b"[" * 200_000),
        (BREAKDOWN, b'{"by height": [{"height": 1, "nodes": 1, "error": 2}]}'),
        (BREAKDOWN, OPERATORS),
        (SNAPSHOTS, b"[" * 200_000),
        (SNAPSHOTS, b'{"step": 1, "length": 1, "layers": [{"name": "\\u001b"}]}'),
    ],
    ids=lambda value: str(value[:24]),
)
def test_hostile_content_is_one_problem(name, content, results):
    (results / name).write_bytes(content)
    assert_problem(results, str(results / name), "cannot be read")


def png(width, height, rows=b""):
    def chunk(name, data):
        crc = zlib.crc32(name + data)
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", crc)

    head = struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0)
    body = zlib.compress(rows or b"\0" * (4 * width + 1) * height)
    return PNG + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def test_a_picture_with_too_many_pixels_is_one_problem(results):
    """650 MB decoded."""
    (results / PICTURE).write_bytes(png(13_000, 13_056, rows=b"\0"))
    assert_problem(results, PICTURE, "13000 x 13056 pixels")
    assert read_picture(png(9, 7))
    for broken in (PNG, PNG + b"\0" * 100, png(2**31 - 1, 2**31 - 1, b"\0"), png(9, 7)[:40]):
        with pytest.raises(ValueError, match=r"PNG|pixels"), guarded():
            read_picture(broken)


# ---------------------------------------------------------------------------------- records

CONTROL = ("\x1b[31m", "\x9b", "\u202e", "a\rb", "\ud800", "\x00")


@pytest.mark.parametrize("mark", CONTROL)
@pytest.mark.parametrize("name", ["variant", "metric", "note", "hardware", "command", "versions"])
def test_control_characters_in_a_record_are_one_problem(mark, name, results):
    append(results, {"seed": 2, name: {mark: "1"} if name == "versions" else f"a{mark}"})
    assert_problem(results, "records.jsonl, line 3", f"'{name}' with control characters")
    assert len(read(results).records) == 2


def test_no_page_has_control_characters(results):
    for place, mark in enumerate(CONTROL):
        append(results, {"seed": place + 2, "variant": mark, "recipe": f"table1/shift/{mark}"})
    (results / "notes.json").write_text(json.dumps({"table1/x\x1b/y": "\x1b[31m"}))
    told = report(results)
    assert (told.status, told.faults()) == (0, []), told
    for page in (results.parent / "site").rglob("*.html"):
        assert not any(map(is_control, page.read_text())), page
    assert "0.875" in (results.parent / "site" / "table1.html").read_text()


TOO_LONG = "letters, and names of files have at most"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"variant": "x" * 300}, TOO_LONG),
        ({"recipe": f"table1/{'x' * 300}/y"}, TOO_LONG),
        *(({"value": value}, "") for value in (10**400, 2**53 + 1, [1], {})),
        *(({"seed": value}, "") for value in (None, 2**70, 0.5)),
        *(({"versions": value}, "") for value in ([], {"a": None}, {"a": {"b": {}}})),
        *(({"version": value}, "") for value in ([], 2**60)),
        ({"steps": True}, ""),
        ({"variant": None}, ""),
        ({"commit": 5}, ""),
        ({"": 1}, ""),
        ({"k" * 10_000: 1}, ""),
        ({"recipe": "table1/" + "x" * 10_000}, ""),
        ({"split": "y" * 10_000}, ""),
    ],
    ids=lambda each: str(each)[:30],
)
def test_hostile_values_in_a_record_are_one_problem(change, words, results):
    append(results, change)
    assert_problem(results, "records.jsonl, line 3", words)
    if words:
        assert report(results).status == 0


def test_a_deeply_nested_record_is_one_problem(results):
    with open(results / "records.jsonl", "a") as file:
        file.write("[" * 200_000 + "\n")
    assert_problem(results, "records.jsonl, line 3", "is not JSON")


def test_many_records_of_one_cell_take_bounded_time(results):
    append(results, *({"seed": seed} for seed in range(2, 10_000)))
    with guarded():
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


# ---------------------------------------------------------------------------------- adding


@pytest.mark.parametrize("kind", ["pipe", "device", "link"])
def test_records_are_not_added_to_a_special_file(kind, results, tmp_path):
    path, outside = results / "records.jsonl", tmp_path / "outside"
    outside.mkdir()
    shutil.copy(path, outside)
    before = tree(outside)
    plant(path, kind, outside / path.name)
    with refusal(path.name):
        add([collected()], results)
    assert tree(outside) == before


def test_a_pipe_in_place_of_a_curve_is_replaced(results):
    path = plant(results / CURVE, "pipe")
    with guarded():
        add([collected(steps=50, steps_asked=50, value=0.5)], results, replace=True)
    assert path.read_text().startswith("step,")


def test_a_record_that_could_not_be_read_again_is_not_added(results):
    for change in ({"note": "\x1b[31m"}, {"variant": "x" * 300}):
        [said] = add([collected(seed=7, **change)], results)
        assert "left out: its record has" in said
    assert read(results).problems == []
    several = replace(RECORD, seed=7, note="two\nlines")
    assert parse_record(several.to_line()) == several


def test_a_site_is_written_beside_a_pipe(results):
    (results.parent / "site" / "layers").mkdir(parents=True)
    os.mkfifo(results.parent / "site" / "layers" / "old.js")
    assert report(results).status == 0
