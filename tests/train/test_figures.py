"""The paper's figures, from tiny runs, from the generator and from recorded results."""

import io
import json

import numpy as np
import pytest
import torch
from PIL import Image
from support import DEVICE

import made_up
from dlrnn import tasks
from dlrnn.analysis.figures import pathfinder_images, plot_errors, plot_images
from dlrnn.cli import main
from dlrnn.tasks.listops import from_text
from dlrnn.train import load_best
from dlrnn.train.figures import listops_errors, predicted_masks
from dlrnn.train.step import forward, held_out

ON = ("--device", DEVICE.type)


@pytest.fixture(scope="module")
def listops(tmp_path_factory):
    """A tiny run on ListOps-SubTrees."""
    folder = tmp_path_factory.mktemp("runs") / "listops"
    return made_up.train(folder, recipe="table3/listops-subtrees/dlr", steps=2)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Tiny runs on Pathfinder-Segmentation, of the recipes at 256 and at 512."""
    folder = tmp_path_factory.mktemp("runs")
    names = [f"table3/pathfinder-segmentation-{size}/dlr" for size in (256, 512)]
    return [made_up.train(folder / name[-7:-4], recipe=name, steps=2) for name in names]


def size_of(path):
    with Image.open(io.BytesIO(path.read_bytes()), formats=["PNG"]) as image:
        return image.size


def test_errors_are_those_of_the_closing_brackets_of_the_split(listops):
    best = load_best(listops, DEVICE)
    wrong = nodes = 0
    close = int(from_text("[MIN 1 2 ]")[-1])
    for batch in held_out(best.task, best.config, "validation", DEVICE):
        predicted = forward(best.model, batch).argmax(-1)
        here = batch.inputs == close
        nodes += int(here.sum())
        wrong += int((predicted != batch.targets)[here].sum())
    name, found = listops_errors(listops, device=DEVICE.type)
    assert name == "dlr"
    for kind in ("by height", "by operator"):
        assert sum(row["nodes"] for row in found[kind]) == nodes > 0
        errors = sum(row["nodes"] * row["error"] for row in found[kind] if row["nodes"])
        assert round(errors) == wrong
    other = listops_errors(listops, split="test", device=DEVICE.type)[1]
    assert [row["nodes"] for row in other["by operator"]] != [
        row["nodes"] for row in found["by operator"]
    ]


def test_the_figure_of_errors_draws_each_model(listops, tmp_path, capsys):
    out = tmp_path / "errors.png"
    given = ["figure", "errors", str(listops), str(listops), "--batches", "1", "--out", str(out)]
    assert main([*given, "--json", *ON]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["of"] == "validation split"
    assert list(shown["errors"]) == ["dlr", f"dlr, {listops}"]
    assert size_of(out) == (1100, 440)
    figure = plot_errors(shown["errors"], shown["of"])
    left, right = figure.axes
    rows = shown["errors"]["dlr"]
    assert [line.get_ydata().tolist() for line in left.lines] == [
        [100 * row["error"] for row in rows["by height"]]
    ] * 2
    heights = [100 * row["error"] for row in rows["by operator"] if row["nodes"]]
    assert [bar.get_height() for bar in right.patches] == heights * 2
    assert "validation split" in figure.get_suptitle()


def test_recorded_errors_can_be_drawn(tmp_path, capsys):
    results = made_up.write(tmp_path)
    out = tmp_path / "errors.png"
    given = ["figure", "errors", "--results", str(results), "--out", str(out)]
    assert main([*given, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["of"] == "test split"
    assert "DLR, seed 0" in found["errors"]
    assert main(["figure", "errors", "--out", str(out)]) == 2
    assert "--results DIR" in capsys.readouterr().err


def test_predicted_masks_are_those_of_the_best_model(images, tmp_path):
    best = load_best(images[0], DEVICE)
    truth, predicted = predicted_masks(images[0], 2, device=DEVICE.type)
    batch = best.task.sample(2, split="validation", device=DEVICE)
    with torch.inference_mode():
        classes = forward(best.model, batch).argmax(-1)
    for row, values in ((truth, batch.targets), (predicted, classes)):
        assert np.array_equal(row.pixels, values.view(2, 64, 64).cpu().numpy())
        assert row.limits == (0, 2)
    assert (truth.name, predicted.name) == ("mask, 64 × 64", "dlr's prediction, 64 × 64")
    out = tmp_path / "masks.png"
    runs = [str(run) for run in images]
    assert main(["figure", "predictions", *runs, "--samples", "2", "--out", str(out), *ON]) == 0
    assert size_of(out)[1] == 4 * 242, "a pair of rows for each run"


def test_a_run_on_another_task_has_no_such_figure(images, listops, tmp_path, capsys):
    out = tmp_path / "out.png"
    for what, run, wanted in (
        ("errors", images[0], "listops-subtrees"),
        ("predictions", listops, "pathfinder-segmentation"),
    ):
        assert main(["figure", what, str(run), "--out", str(out), *ON]) == 2
        assert f"a run on {wanted} was expected" in capsys.readouterr().err
    assert not out.exists()


def test_figure_1_has_images_above_their_masks(tmp_path):
    rows = pathfinder_images(32, 3)
    batch = tasks.get("pathfinder-segmentation", resolution=32).sample(3, split="validation")
    drawn = [axes.images[0].get_array() for axes in plot_images(rows).axes]
    expected = [*batch.inputs.view(3, 32, 32), *batch.targets.view(3, 32, 32)]
    assert all((torch.tensor(np.array(a)) == b).all() for a, b in zip(drawn, expected, strict=True))
    out = tmp_path / "figure.png"
    assert main(["figure", "pathfinder", "--resolution", "32", "--out", str(out)]) == 0
    assert size_of(out)[1] == 2 * 242
