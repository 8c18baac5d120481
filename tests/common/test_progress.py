import re
from types import SimpleNamespace

import pytest

from dlrnn.common import progress
from dlrnn.common.progress import Progress


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test sets."""
    found = SimpleNamespace(now=100.0)
    monkeypatch.setattr(progress.time, "perf_counter", lambda: found.now)
    return found


def shown(capsys):
    return capsys.readouterr().err.splitlines()


def test_outside_a_terminal_a_line_is_printed_every_few_seconds_and_at_the_end(clock, capsys):
    with Progress("train", "steps", total=100, start=40) as bar:
        for now, done in ((101.0, 50), (102.0, 60), (107.0, 80), (108.0, 90)):
            clock.now = now
            bar.update(done, text="loss 1")
        assert shown(capsys) == [
            "train  50/100  loss 1  10 steps/s  5 s left",
            "train  80/100  loss 1  5.71 steps/s  4 s left",
        ]
    assert shown(capsys) == ["train  90/100  loss 1  6.25 steps/s  2 s left"]


def test_quick_work_is_silent_and_an_unknown_total_is_left_out(clock, capsys):
    with Progress("verify", "shards", quiet_seconds=10) as bar:
        clock.now = 105.0
        bar.update(5)
        assert not shown(capsys)
        clock.now = 120.0
        bar.update(10)
        assert shown(capsys) == ["verify  10  0.5 shards/s"]


def test_a_bar_is_shown_in_a_terminal_from_the_first_update(monkeypatch, capsys):
    for name, value in (("FORCE_COLOR", "1"), ("TERM", "xterm"), ("COLUMNS", "120")):
        monkeypatch.setenv(name, value)
    with Progress("build [x]", "samples") as bar:
        assert capsys.readouterr().err == ""
        bar.update(3, total=9, text="[red]")
        bar.say("a line\x1b[31m")
    told = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().err)
    assert "build [x]" in told
    assert "3/9" in told
    assert "[red]" in told
    assert "a line\\x1b[31m" in told
