"""Layers, packed for the explorer; and which of them fit."""

import base64
import json
import math

import numpy as np
import pytest

import made_up
from dlrnn.bench.cases import BANDWIDTH, PRODUCTS, Case
from dlrnn.paper.results import read_snapshots
from dlrnn.paper.snapshots import SAMPLES, check_snapshot
from dlrnn.report.explorer import Run, fitted, left_out
from dlrnn.report.speed import CEILING


def words(text):
    return np.frombuffer(base64.b64decode(text), "<i2").astype(float)


def test_packed_numbers_are_right():
    raw = made_up.snapshots(length=200)[1]
    layer = raw["layers"][0]
    packed = check_snapshot(raw)["layers"][0]
    sizes, phases = words(packed["eigenvalues"]).reshape(-1, 2).T
    true = np.array(layer["eigenvalues"])
    np.testing.assert_allclose(-(10 ** (sizes / 2000)), true[:, 0], rtol=1e-3)
    np.testing.assert_allclose(phases / 32767 * math.pi, true[:, 1], atol=1e-4)
    for one, true in zip(packed["kernels"], layer["kernels"], strict=True):
        values = words(one["values"]) / 32767 * one["high"]
        np.testing.assert_allclose(values, true["values"], atol=1e-4 * one["high"])
    np.testing.assert_allclose(10 ** (words(packed["response"]) / 2000), layer["response"], 1e-3)
    assert check_snapshot(json.loads(json.dumps(check_snapshot(raw)))) == check_snapshot(raw)
    assert len(json.dumps(check_snapshot(raw))) < 0.4 * len(json.dumps(raw))


def test_long_kernels_keep_their_peaks():
    raw = made_up.snapshots(length=4096)[0]
    layer = raw["layers"][0]
    assert (layer["stride"], len(layer["response"])) == (8, 512)
    layer["response"][37] = 1e3
    layer["eigenvalues"][0] = [0.0, math.inf]
    packed = check_snapshot(raw)["layers"][0]
    assert packed["stride"] == 16
    assert len(words(packed["response"])) == SAMPLES
    assert words(packed["response"])[18] == 6000
    assert list(words(packed["eigenvalues"])[:2]) == [-32768, 0], "no end, and no phase"


@pytest.mark.parametrize(
    ("name", "value"),
    [("eigenvalues", "AAAA"), ("response", "A"), ("response", 3), ("eigenvalues", "<i>x")],
)
def test_wrongly_packed_snapshots_are_left_out(name, value):
    good = check_snapshot(made_up.snapshots()[0])
    bad = json.loads(json.dumps(good)) | {"step": 7}
    bad["layers"][0][name] = value
    lines = [json.dumps(each) for each in (good, bad)]
    assert read_snapshots("\n".join(lines).encode()) == ([good], [2]), "the rest is there"


def runs(cells, seeds, *, size=100, steps=16):
    return [
        Run(f"{cell}-{seed}", f"run {cell} {seed}", ("ours", str(cell), ""), ["x" * size] * steps)
        for cell in range(cells)
        for seed in range(seeds)
    ]


def test_as_many_runs_as_fit_are_kept():
    many = runs(4, 2)
    whole = sum(run.size(16) for run in many)
    assert fitted(many, whole) == (many, 16)
    assert left_out(many, many) == ""
    kept, steps = fitted(many, whole - 1)
    assert ([run.key for run in kept], steps) == (["0-0", "1-0", "2-0", "3-0"], 16)
    said = "Left out to limit the size of the pages: 4 further seeds of the runs that are shown."
    assert left_out(many, kept) == said
    kept, steps = fitted(many, whole // 8)
    assert (len(kept), steps) == (4, 3), "fewer steps before fewer runs"
    kept, steps = fitted(many, many[0].size(2) * 3)
    assert ([run.key for run in kept], steps) == (["0-0", "1-0", "2-0"], 2)
    assert left_out(many, kept).endswith(
        "3 further seeds of the runs that are shown; run 3 0; run 3 1."
    )
    assert fitted([], 0)[0] == []
    assert len(many[0].script(3)) <= many[0].size(3)


def test_the_ceiling_is_that_of_the_benchmark():
    assert f"{BANDWIDTH / 1e12:.1f} TB/s" in CEILING
    assert f"at {PRODUCTS / 1e12:.0f} TFLOP/s" in CEILING
    case = Case("x", batch=1, channels=128, states=1024, length=512, kernel=512)
    byte, flop = 5 * 4 * 512 * 128 / BANDWIDTH, 12 * 128 * 1024 * 512 / PRODUCTS
    assert case.ceiling == pytest.approx(1e3 * (byte + flop))
