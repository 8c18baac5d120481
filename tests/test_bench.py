"""`dlrnn bench`: the tiny layer, a token of the language model, the paper's listing."""

import json

import pytest
import torch
from support import DEVICE, assert_close, relative_error

from dlrnn.bench.generate import lower_quartile
from dlrnn.bench.layer import bench_tiny
from dlrnn.bench.listing import RoundedPhasesDLR
from dlrnn.bench.measure import LayerCall
from dlrnn.cli import main
from dlrnn.nn import DLR

GENERATE = ["--layers", "1", "--prompt", "24", "--tokens", "30", "--factor", "3"]


def test_the_tiny_layer_is_compared_with_the_listing_on_one_thread(capsys):
    threads = torch.get_num_threads()
    result = bench_tiny(repeats=5)
    assert torch.get_num_threads() == threads
    assert result["case"] == {"B": 2, "H": 16, "N": 16, "L": 64}
    assert result["threads"] == 1
    assert result["dlrnn"]["error"] < 1e-5
    assert result["listing"]["error"] < 1e-3
    expected = result["dlrnn"]["ms"] / result["listing"]["ms"]
    assert result["ratio"] == pytest.approx(expected, rel=0.9)
    assert main(["bench", "layer", "--tiny"]) == 0
    assert "of its time" in capsys.readouterr().out
    assert main(["bench", "layer", "--tiny", "--device", "cuda"]) == 2
    assert "--tiny" in capsys.readouterr().err


def test_a_wrong_listing_gives_no_ratio(monkeypatch):
    monkeypatch.setattr("dlrnn.bench.layer.LISTING_TOLERANCE", 0.0)
    with pytest.raises(RuntimeError, match="errors above"):
        bench_tiny(repeats=1)


def test_a_token_of_dlr_keeps_the_same_state(capsys):
    assert main(["bench", "generate", "--json", *GENERATE, "--device", DEVICE.type]) == 0
    result = json.loads(capsys.readouterr().out)
    rows = result["tokens"]
    assert [row["position"] for row in rows] == [10, 12, 14, 16, 18]
    assert len({row["dlr_MB"] for row in rows}) == 1
    sizes = [row["attention_MB"] for row in rows]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]
    assert all(row[f"{mixer}_ms"] > 0 for row in rows for mixer in ("dlr", "attention"))
    assert result["case"] == {"B": 1, "layers": 1, "experts": 1, "prompt": 8}


def test_generate_prints_a_table(capsys):
    assert main(["bench", "generate", *GENERATE, "--experts", "2", "--device", DEVICE.type]) == 0
    out = capsys.readouterr().out
    assert "attention_ms" in out
    assert "dlr: a token costs" in out


def test_a_step_stands_beside_attention(capsys):
    options = ["--repeats", "1", "--factor", "64", "--device", DEVICE.type]
    assert main(["bench", "step", "--peers", "--json", *options]) == 0
    rows = json.loads(capsys.readouterr().out)["steps"]
    assert {row["layer"].split(",")[0] for row in rows} == {"DLR", "attention"}
    columns = ("eager us", "graph us") if DEVICE.type == "cuda" else ("eager us",)
    assert all(row[column] > 0 for row in rows for column in columns)


@pytest.mark.parametrize(
    ("times", "quartile"), [([7.0], 7.0), ([1.0, 9.0], 3.0), ([5.0, 1.0, 3.0, 2.0, 4.0], 2.0)]
)
def test_the_lower_quartile_lies_between_the_times(times, quartile):
    assert lower_quartile(times) == quartile


@pytest.mark.parametrize("options", [{}, {"cast": "prod"}, {"bidirectional": True}], ids=str)
def test_rounded_phases_give_the_same_layer_at_short_lengths(options, monkeypatch):
    monkeypatch.setattr(RoundedPhasesDLR, "positions", 16)
    torch.manual_seed(0)
    layer = DLR(3, 5, **options)
    rounded = RoundedPhasesDLR(3, 5, **options)
    rounded.load_state_dict(layer.state_dict())
    x, dy = torch.randn(2, 2, 50, 3)
    (y, *have), (expected, *want) = (LayerCall(each)(x, dy) for each in (rounded, layer))
    assert_close(y, expected, 1e-5)
    for gradient, other in zip(have, want, strict=True):
        assert_close(gradient, other, 1e-4)


def test_rounded_phases_are_wrong_at_a_long_length():
    torch.manual_seed(0)
    layer = DLR(1, 8, dt_min=1e-6, dt_max=1e-6)
    rounded = RoundedPhasesDLR(1, 8)
    rounded.load_state_dict(layer.state_dict())
    length = 2**17
    with torch.no_grad():
        exact = layer.double().kernel(length)[:, -100:]
        have = layer.float().kernel(length)[:, -100:]
        wrong = rounded.kernel(length)[:, -100:]
    assert relative_error(have, exact) < 1e-5
    assert relative_error(wrong, exact) > 1e-3
