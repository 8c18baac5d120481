"""Records and results on disk: lines and files that are read, refused or reported."""

import json
import math
import re
from dataclasses import asdict, replace

import pytest

import made_up
from dlrnn.paper.records import VERSION, parse_record, stem
from dlrnn.paper.results import curve_bytes, read_curve, read_results
from dlrnn.paper.store import add
from dlrnn.report.site import write_site
from made_up import SHIFT


def test_a_record_survives_writing_and_reading():
    made = made_up.record(variant="é|<b>", note="a\nb", commit=None)
    for record in (made, replace(made, value=None)):
        assert parse_record(record.to_line()) == record


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": VERSION + 1}, "has version 2, and this dlrnn reads up to 1"),
        ({"value": "1"}, "value must be a number or null, not '1'"),
        ({"value": True}, "value must be a number or null, not True"),
        ({"value": math.nan}, "not finite"),
        ({"recipe": "../../etc"}, "not table/task/model"),
        ({"steps": 1.5}, "steps must be a whole number"),
        ({"versions": {"torch": 2}}, "versions.torch must be text"),
        ({"colour": 1}, "unknown key 'colour'"),
        ({"recipe": "table9/x/y"}, "has the table 'table9' instead of one of table1, table2"),
        ({"split": "tset"}, "split must be train or validation or test"),
        ({"scale": "huge"}, "scale must be full or tiny or changed"),
        ({"steps": -3}, "has -3 of 40000 steps"),
        ({"steps_asked": 0}, "has 40000 of 0 steps"),
    ],
)
def test_a_line_with_a_wrong_value_is_refused(change, said):
    line = json.dumps({**asdict(made_up.record()), **change})
    with pytest.raises(ValueError, match=re.escape(said)):
        parse_record(line)


@pytest.mark.parametrize(
    ("line", "said"), [("{", "not JSON"), ("[]", "must be a JSON object"), ("{}", "lacks")]
)
def test_a_line_that_is_not_a_record_is_refused(line, said):
    with pytest.raises(ValueError, match=said):
        parse_record(line)


def test_old_lines_lack_later_fields():
    values = asdict(made_up.record())
    del values["scale"], values["stopped"]
    assert parse_record(json.dumps(values)) == made_up.record()


def test_names_of_files_have_no_special_characters():
    assert stem("table1/shift/dlr-1", "", 3) == "table1_shift_dlr-1_seed-3"
    assert stem("table1/../x", "a/b <c>", 0) == "table1__x_a-b-c_seed-0"


def test_a_curve_survives_writing_and_reading():
    curve = {"train loss": [(1, 0.5), (2, 0.25)], "validation R2": [(2, 0.125)]}
    assert read_curve(curve_bytes(curve)) == curve


def test_a_byte_that_is_not_text_is_replaced(tmp_path):
    line = made_up.record(note="cafe").to_line().encode().replace(b"cafe", b"caf\xe9")
    (tmp_path / "records.jsonl").write_bytes(b"\xef\xbb\xbf" + line)  # with a mark of Windows
    add([made_up.run(SHIFT, seed=1)], tmp_path)
    found = read_results(tmp_path, "ours")
    assert {record.seed: record.note for record in found.records} == {0: "caf\ufffd", 1: ""}
    write_site(tmp_path / "site", [found], tmp_path / "none")
    assert "caf\ufffd" in (tmp_path / "site" / "table1.html").read_text()


def test_of_two_lines_of_one_run_the_later_one_counts(tmp_path):
    lines = [made_up.record(value=value).to_line() for value in (0.1, 0.2)]
    (tmp_path / "records.jsonl").write_text("\n".join(lines))
    assert [record.value for record in read_results(tmp_path, "ours").records] == [0.2]


@pytest.mark.parametrize(
    "content",
    ["step,validation R2\n-5,0.1\n9,0.2\n", "step,validation R2\n1,1e308\n9,-1e308\n"],
)
def test_a_curve_that_cannot_be_drawn_does_not_stop_the_site(tmp_path, content):
    made = made_up.run(SHIFT)
    add([made], tmp_path)
    (tmp_path / "curves" / f"{made.stem}.csv").write_text(content)
    write_site(tmp_path / "site", [read_results(tmp_path, "ours")], tmp_path / "none")
    assert (tmp_path / "site" / "table1.html").exists()
