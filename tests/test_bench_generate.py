"""`dlrnn bench generate`: what it prints; a state of one size against one that grows."""

import json

import pytest
from support import DEVICE

from dlrnn.bench.generate import _lower_quartile
from dlrnn.cli import main

SMALL = ["--layers", "1", "--prompt", "24", "--tokens", "30", "--factor", "3"]


def test_a_token_of_dlr_keeps_the_same_state(capsys):
    assert main(["bench", "generate", "--json", *SMALL, "--device", DEVICE.type]) == 0
    result = json.loads(capsys.readouterr().out)
    rows = result["tokens"]
    assert [row["position"] for row in rows] == [10, 12, 14, 16, 18]
    assert len({row["dlr_MB"] for row in rows}) == 1
    sizes = [row["attention_MB"] for row in rows]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]
    assert all(row[f"{mixer}_ms"] > 0 for row in rows for mixer in ("dlr", "attention"))
    assert result["case"] == {"B": 1, "layers": 1, "experts": 1, "prompt": 8}


def test_the_table(capsys):
    assert main(["bench", "generate", *SMALL, "--experts", "2", "--device", DEVICE.type]) == 0
    out = capsys.readouterr().out
    assert "attention_ms" in out
    assert "dlr: a token costs" in out


@pytest.mark.parametrize(
    ("times", "quartile"), [([7.0], 7.0), ([1.0, 9.0], 3.0), ([5.0, 1.0, 3.0, 2.0, 4.0], 2.0)]
)
def test_a_quarter_of_the_times_is_below(times, quartile):
    """Two tokens of a window, one of them nine times as slow, are no reason to go below 0."""
    assert _lower_quartile(times) == quartile
