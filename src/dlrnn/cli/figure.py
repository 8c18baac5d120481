"""`dlrnn figure`: the paper's figures, from the generator, from runs or from recorded results."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlrnn.cli import command, count, device_option, print_json, resolve, say, trust_option, warn

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dlrnn.analysis.figures import Breakdown

RECIPES = "table3/listops-subtrees/"


def add(commands: Any) -> None:
    """Add the parser of the command."""
    figures = commands.add_parser("figure", help="draw the paper's figures", allow_abbrev=False)
    what = figures.add_subparsers(dest="case", required=True, metavar="WHAT")

    text = "images of Pathfinder-Segmentation and their masks (Figure 1)"
    images = command(what, "pathfinder", _pathfinder, text)
    images.add_argument("--resolution", type=count, default=256, metavar="R")
    images.add_argument("--seed", type=int, default=0)
    _shared(images, samples=True)

    text = "masks and predictions of runs on Pathfinder-Segmentation, a pair of rows for each"
    masks = command(what, "predictions", _predictions, text)
    masks.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    _shared(masks, samples=True)
    device_option(masks)
    trust_option(masks)

    text = "errors of runs on ListOps-SubTrees, by height and by operator"
    errors = command(what, "errors", _errors, text)
    errors.add_argument("runs", nargs="*", type=Path, metavar="RUN")
    text = "draw what is recorded in this folder (of the test split) instead of runs"
    errors.add_argument("--results", type=Path, metavar="DIR", help=text)
    text = "evaluate only the first N batches; default: all of the split"
    errors.add_argument("--batches", type=count, metavar="N", help=text)
    _shared(errors, samples=False)
    device_option(errors)
    trust_option(errors)


def _shared(parser: argparse.ArgumentParser, *, samples: bool) -> None:
    splits = ("train", "validation", "test")
    parser.add_argument("--split", choices=splits, default="validation")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="a PNG")
    if samples:
        parser.add_argument("--samples", type=count, default=4, metavar="N", help="images in a row")


def _pathfinder(given: argparse.Namespace) -> int:
    from dlrnn.analysis.figures import pathfinder_images, plot_images

    rows = pathfinder_images(given.resolution, given.samples, split=given.split, seed=given.seed)
    return _save(plot_images(rows), given)


def _predictions(given: argparse.Namespace) -> int:
    from dlrnn.analysis.figures import plot_images
    from dlrnn.train.figures import predicted_masks

    options = {"split": given.split, "device": resolve(given.device), "trust": given.trust}
    rows = [row for run in given.runs for row in predicted_masks(run, given.samples, **options)]
    return _save(plot_images(rows), given)


def _errors(given: argparse.Namespace) -> int:
    from dlrnn.analysis.figures import plot_errors

    if bool(given.runs) == (given.results is not None):
        raise ValueError("name runs, or the folder of results with --results DIR, not both")
    found, of = _recorded(given.results) if given.results else _evaluated(given)
    return _save(plot_errors(found, of), given, {"of": of, "errors": found})


def _evaluated(given: argparse.Namespace) -> tuple[dict[str, "Breakdown"], str]:
    """The errors of runs by the name of their mixer; equal names get the path of their run."""
    from dlrnn.train.figures import listops_errors

    options = {"split": given.split, "batches": given.batches, "device": resolve(given.device)}
    found: dict[str, Breakdown] = {}
    for run in given.runs:
        name, errors = listops_errors(run, **options, trust=given.trust)
        found[f"{name}, {run}" if name in found else name] = errors
    return found, f"{given.split} split"


def _recorded(folder: Path) -> tuple[dict[str, "Breakdown"], str]:
    """The recorded errors, by the paper's names of the models."""
    from dlrnn.paper.recipes.table3 import MODELS
    from dlrnn.paper.results import check_results, read_results

    check_results(folder)
    results = read_results(folder, "ours")
    for problem in results.problems:
        warn(f"dlrnn figure: {problem}")
    found = {}
    for record in results.records:
        model = record.recipe.removeprefix(RECIPES)
        if model in MODELS and record.stem in results.breakdowns:
            told = [MODELS[model], record.variant, f"seed {record.seed}"]
            found[", ".join(filter(None, told))] = results.breakdowns[record.stem]
    if not found:
        raise ValueError(f"{folder} has no errors by height and operator: name runs instead")
    return found, "test split"


def _save(figure: "Figure", given: argparse.Namespace, values: Any = None) -> int:
    """Write the figure; with --json print the file and the values that it shows."""
    from io import BytesIO

    from dlrnn.common.files import write_whole

    content = BytesIO()
    figure.savefig(content, dpi=110, format="png", metadata={"Software": None})
    given.out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(given.out, content.getvalue())
    if given.json:
        return print_json({"written": str(given.out), **(values or {})})
    say(f"drawn: {given.out}")
    return 0
