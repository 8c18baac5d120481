"""`dlrnn train`, `eval`, `generate`, `export`, `recipes`, `reproduce` and `sweep`."""

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlrnn.cli import (
    command,
    count,
    device_option,
    is_rank_zero,
    print_json,
    print_table,
    resolve,
    say,
    trust_option,
    warn,
)
from dlrnn.common.untrusted import printable

if TYPE_CHECKING:
    from dlrnn.train import RunConfig

SCALES = ("full", "short", "tiny")
FLAGS = ("sharded", "early_stop", "trust", "json")


def add(commands: Any) -> None:
    """Add the parsers of these commands."""
    train = command(commands, "train", _train, "train a recipe or a task, or resume")
    train.set_defaults(takes_overrides=True)
    train.usage = (
        "dlrnn train RECIPE [--scale tiny] [--out RUN] [--steps 100 ...]"
        " | --task NAME_OR_PATH [--out RUN] [--model.mixer dlr ...] | --resume RUN"
    )
    train.epilog = (
        "RECIPE is one of `dlrnn recipes`. Any setting of it can be changed:"
        " --steps 100 --lr 1e-4 --seed 1 --task.settings.length 512 --model.d_model 64"
        " --model.mixer my_package.MyLayer --model.mixer_options.d_state 64;"
        " `dlrnn recipes --show RECIPE` prints them all."
    )
    text = "instead of a recipe: a task by its name or import path, with default settings"
    train.add_argument("--task", metavar="NAME_OR_PATH", help=text)
    train.add_argument("--out", type=Path, metavar="RUN", help="a new directory; default: runs/...")
    train.add_argument("--resume", type=Path, metavar="RUN", help="the directory of a stopped run")
    _scale(train)
    device_option(train)
    text = "processes on this machine; default: what torchrun says, else 1"
    train.add_argument("--devices", type=count, help=text)
    train.add_argument("--nodes", type=count, help="machines; default: what torchrun says, else 1")
    text = "share the parameters among the processes (FSDP), instead of a copy in each"
    train.add_argument("--sharded", action="store_true", help=text)
    _early_stop(train)
    trust_option(train)
    train.add_argument("--writer", choices=("tensorboard", "wandb", "none"), default="tensorboard")

    text = "evaluate the best checkpoint of a run, and draw predictions"
    evaluate = _of_a_run(commands, "eval", _eval, text)
    evaluate.add_argument("--split", choices=("train", "validation", "test"), default="test")
    device_option(evaluate)

    text = "generate text from the best model of a run"
    writes = _of_a_run(commands, "generate", _generate, text, json=False)
    writes.add_argument("--prompt", required=True, metavar="TEXT")
    writes.add_argument("--tokens", type=count, default=200, help="at most this many; default: 200")
    text = "0 always takes the most likely token; default: 1"
    writes.add_argument("--temperature", type=float, default=1.0, help=text)
    text = "draw from the K most likely tokens"
    writes.add_argument("--top-k", type=count, metavar="K", help=text)
    text = "draw from the fewest tokens that together have probability P"
    writes.add_argument("--top-p", type=float, metavar="P", help=text)
    writes.add_argument("--seed", type=int, default=0)
    device_option(writes)

    text = "write the best model of a run as a folder for from_pretrained, or upload it"
    exported = _of_a_run(commands, "export", _export, text, json=False)
    exported.add_argument("out", type=Path, metavar="DIR")
    exported.add_argument("--push", metavar="OWNER/NAME", help="upload it to the Hub, too")

    _add_recipes(commands)


def _of_a_run(commands: Any, name: str, run: Any, text: str, **options: Any) -> Any:
    """A command for the directory of a run, whose files may name code."""
    parser = command(commands, name, run, text, **options)
    parser.add_argument("run_folder", type=Path, metavar="RUN")
    trust_option(parser)
    return parser


def _add_recipes(commands: Any) -> None:
    listed = command(
        commands, "recipes", _recipes, "list every number of the paper, with ours and yours"
    )
    some = "tables, tasks or patterns: table1, table1/shift, 'table1/*/dlr-1'"
    listed.add_argument("recipes", nargs="*", metavar="RECIPE", help=f"{some}; default: all")
    text = "the folder with your runs, below it SCALE/RECIPE; default: runs"
    listed.add_argument("--out", type=Path, default=Path("runs"), metavar="DIR", help=text)
    listed.add_argument("--show", metavar="RECIPE", help="print one recipe's configuration")
    _scale(listed)

    again = command(
        commands, "reproduce", _reproduce, "train the missing runs of a table, and write the table"
    )
    again.add_argument("table", metavar="TABLE", help="table1 ... table6")
    again.add_argument("--only", metavar="TASK/MODEL", help="only these cells, e.g. shift/dlr-1")
    _several_runs(again)

    sweep = command(commands, "sweep", _sweep, "train many recipes and seeds in several processes")
    sweep.set_defaults(takes_overrides=True)
    sweep.usage = "dlrnn sweep RECIPE ... [--seeds 3] [--jobs 2] [--scale tiny] [--steps 100 ...]"
    sweep.epilog = (
        "Any setting can be changed for all recipes, as with `dlrnn train`:"
        " dlrnn sweep 'table1/*/dlr-1' --scale tiny --model.mixer my_package.MyLayer"
    )
    sweep.add_argument("recipes", nargs="+", metavar="RECIPE", help=f"names, or {some}")
    sweep.add_argument("--jobs", type=count, default=1, help="number of parallel processes")
    sweep.add_argument("--slurm", metavar="PARTITION", help="submit to Slurm instead")
    _several_runs(sweep)


def _several_runs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=count, default=1, metavar="N", help="seeds 0 .. N-1")
    parser.add_argument("--out", type=Path, default=Path("runs"), metavar="DIR")
    _early_stop(parser)
    _scale(parser)
    device_option(parser)


def _scale(parser: argparse.ArgumentParser) -> None:
    text = "full: the paper's run; short: a tenth of its steps; tiny: seconds to minutes on a CPU"
    parser.add_argument("--scale", choices=SCALES, default="full", help=text)


def _early_stop(parser: argparse.ArgumentParser) -> None:
    text = "end a run whose metric stays at 1, or at 0 in the second half of its steps"
    parser.add_argument("--early-stop", action="store_true", help=text)
    text = argparse.SUPPRESS  # the name of this option in the commands that results/ records
    parser.add_argument("--until-plain", dest="early_stop", action="store_true", help=text)


def _train(given: argparse.Namespace) -> int:
    from dlrnn.train import RunDirectory, train
    from dlrnn.train.checkpoint import needs_trust

    names = ("devices", "nodes", "sharded", "writer", "early_stop", "trust")
    options = {name: getattr(given, name) for name in names}
    options |= {"device": resolve(given.device), "show": not given.json}
    if given.resume is None:
        path, config = _run_of(given)
    elif given.task or given.overrides or given.out or given.scale != "full":
        raise ValueError(
            "--resume cannot be combined with a recipe, --task, --out, --scale or settings: a run"
            " keeps its configuration; for other settings, or more steps, begin a new run"
        )
    else:
        path, config = given.resume, None
    complete = config is None and RunDirectory.open(path).result is not None
    try:
        result = train(path, config, **options)
    except KeyboardInterrupt:
        if is_rank_zero() and (path / "config.json").is_file():
            print(file=sys.stderr)
            if (path / "result.json").is_file():
                warn(f"dlrnn train: the run {path} is complete")
            else:
                given.trust |= config is not None and needs_trust(config)
                warn(f"continue with: {_resume_command(path, given)}")
        raise
    if not is_rank_zero():
        return 0
    if complete:
        already = f"complete already, after {result['steps']} steps: nothing was done"
        warn(f"dlrnn train: {path} is {already}")
    if given.json:
        return print_json({"run": str(path), **result})
    metric = result["metric"]
    if "stopped" in result:
        say(f"stopped after {result['steps']} steps: {result['stopped']}")
    say(f"{metric} {result['value']:.4f} (best {result['best']:.4f}), run: {path}")
    return 0


def _resume_command(path: Path, given: argparse.Namespace) -> str:
    """The command that resumes a run with the options of this one, which no file stores."""
    values = {name: getattr(given, name) for name in ("device", "devices", "nodes")}
    values["writer"] = None if given.writer == "tensorboard" else given.writer
    flags = [f"--{name.replace('_', '-')}" for name in FLAGS if getattr(given, name)]
    options = [f"--{name} {value}" for name, value in values.items() if value is not None]
    return " ".join([f"dlrnn train --resume {shlex.quote(str(path))}", *options, *flags])


def _run_of(given: argparse.Namespace) -> tuple[Path, "RunConfig"]:
    """The directory and the configuration of a new run."""
    from dlrnn.paper import recipes
    from dlrnn.paper.runs import changed_path
    from dlrnn.train import with_overrides

    if given.task is not None:
        return _run_of_task(given)
    if not given.overrides:
        raise ValueError("name a recipe (see `dlrnn recipes`), a --task, or --resume a run")
    name, *overrides = given.overrides  # the values of settings are words without dashes, too
    if name.startswith("-"):
        raise ValueError("name the recipe first: dlrnn train RECIPE --steps 100 ..., or a --task")
    recipe = recipes.get(name)
    unchanged = recipes.scaled(recipe, given.scale)
    config = with_overrides(unchanged, overrides)
    for note in _not_inherited(unchanged, config) if is_rank_zero() else ():
        warn(note)
    return given.out or changed_path(recipe, "runs", given.scale, config), config


def _run_of_task(given: argparse.Namespace) -> tuple[Path, "RunConfig"]:
    """The same for `--task`, from default settings, which are printed."""
    from dlrnn.paper.runs import run_name
    from dlrnn.train import default_run, with_overrides

    words = given.overrides
    if given.scale != "full":
        raise ValueError("--scale is for recipes: with --task, give --steps and the sizes")
    if words and not words[0].startswith("-"):
        raise ValueError(f"--task is instead of a recipe, and {words[0]!r} was given, too")
    unchanged = default_run(given.task)
    config = with_overrides(unchanged, words)
    if config.task.name != given.task:
        raise ValueError(f"--task is {given.task}, and --task.name is {config.task.name}")
    config.make_task()  # its errors stand alone
    if is_rank_zero():
        print(config.to_json(), end="", file=sys.stderr)
    return given.out or Path("runs") / "tasks" / given.task / run_name(config, unchanged), config


def _not_inherited(old: "RunConfig", new: "RunConfig") -> list[str]:
    """Notes that another mixer or task starts from its own defaults."""
    options = getattr(old.model, "mixer_options", {})
    changes = (
        (old.model.mixer, new.model.mixer, options, "model.mixer_options"),
        (old.task.name, new.task.name, old.task.settings, "task.settings"),
    )
    return [
        f"note: {after} does not inherit the settings of {before} ({', '.join(known)});"
        f" --{where}.NAME VALUE sets its own"
        for before, after, known, where in changes
        if before != after and known
    ]


def _eval(given: argparse.Namespace) -> int:
    from dlrnn.train.evaluation import evaluate_run

    device = resolve(given.device)
    result = evaluate_run(given.run_folder, split=given.split, device=device, trust=given.trust)
    if given.json:
        return print_json(result)
    so_far = "" if result["complete"] else ", so far: the run is not complete"
    print(f"{given.split}, at its best checkpoint (step {result['step']}{so_far})")
    for name, value in result["metrics"].items():
        say(f"{name:>16}  {value:.4f}")
    for name, rows in result["breakdown"].items():
        print_table(name, rows)
    for picture in result["pictures"]:
        say(f"drawn: {picture}")
    if "not_written" in result:
        warn(f"dlrnn eval: {result['not_written']}")
    return 0


def _generate(given: argparse.Namespace) -> int:
    from dlrnn.train.evaluation import generate_text

    options = ("tokens", "temperature", "top_k", "top_p", "seed")
    settings = {name: getattr(given, name) for name in options}
    settings |= {"device": resolve(given.device), "trust": given.trust}
    pieces = generate_text(given.run_folder, given.prompt, **settings)
    print(given.prompt, end="", flush=True)
    for piece in pieces:  # tokens of an untrusted run may hold control characters
        print(printable(piece, allowed="\n\t"), end="", flush=True)
    print()
    return 0


def _export(given: argparse.Namespace) -> int:
    from dlrnn.train.evaluation import export_run

    replaced = (given.out / "config.json").exists()
    where = export_run(given.run_folder, given.out, push=given.push, trust=given.trust)
    say(f"the model is in {where}{'; it replaced an older one' if replaced else ''}")
    return 0


def _recipes(given: argparse.Namespace) -> int:
    from dlrnn.paper import recipes
    from dlrnn.paper.reproduce import listing

    if given.show:
        recipe = recipes.get(given.show)
        print(recipes.scaled(recipe, given.scale).to_json(), end="")
        return 0
    asked = recipes.chosen(given.recipes or recipes.TABLES)
    recorded, rows, refused = _recorded(Path("results")), [], False
    for line in listing(given.out, given.scale, asked):
        refused |= line.pop("refused")
        shown = {key: line.pop(key) for key in ("name", "metric", "paper")}
        rows.append({**shown, "ours": recorded.get(shown["name"]) or None, **line})
    if not any(recorded.values()):
        nothing = "'ours' is empty: results/ has no record of a recipe (a clone of dlrnn has)"
        warn(f"dlrnn recipes: {nothing}")
    if given.json:
        return print_json(rows) or 2 * refused
    about = f"yours and their status from {given.out}/{given.scale}/"
    print_table(f"Ours from results/, {about}; minutes are an estimate, on one H200", rows)
    if any("*" in (row["ours"] or "") for row in rows):
        print("*: fewer steps than the paper's, another size, or not tested: see docs/results.md")
    if refused:
        warn("dlrnn recipes: a run's files were refused: see the column status")
    return 2 * refused


def _recorded(folder: Path) -> dict[str, str]:
    """Our numbers by recipe; a star marks those that `dlrnn report` does not compare."""
    from dlrnn.paper.comparison import our_number, range_text
    from dlrnn.paper.results import read_results
    from dlrnn.paper.tables import make_tables

    results = read_results(folder, "ours")
    for problem in results.problems:
        warn(f"dlrnn recipes: {problem}")
    tables = make_tables([results])
    cells = [cell for table in tables for cell in table.cells.values()]
    found = {}
    for cell in cells:
        numbers = [our_number(each) + "*" * (not each.is_comparable) for each in cell.ours.values()]
        ranges = [f" ({text})" if (text := range_text(each)) else "" for each in cell.ours.values()]
        found[cell.recipe] = " / ".join(map("".join, zip(numbers, ranges, strict=True)))
    return found


def _options_of_runs(given: argparse.Namespace) -> dict[str, Any]:
    """What `reproduce` and `sweep` have in common."""
    same = {name: getattr(given, name) for name in ("scale", "out", "early_stop")}
    return {**same, "seeds": range(given.seeds), "device": resolve(given.device)}


def _reproduce(given: argparse.Namespace) -> int:
    from dlrnn.paper import recipes
    from dlrnn.paper.numbers import short

    rows = recipes.reproduce(
        given.table, only=given.only, show=not given.json, **_options_of_runs(given)
    )
    lines = [
        {
            "recipe": row.recipe,
            "paper": short(row.paper),
            "yours": short(row.yours) or None,
            "seeds": row.seeds,
            "spread": short(row.spread) or None,
            "status": row.status,
        }
        for row in rows
    ]
    if given.json:
        print_json(lines)
    else:
        print_table(f"{given.table}, {given.scale}", lines)
        say(f"the whole table: {given.out / given.scale / given.table}.md")
    broken = any("broken" in row.status for row in rows)
    return 2 if any(row.refused for row in rows) else int(broken)


def _sweep(given: argparse.Namespace) -> int:
    from dlrnn.paper.sweep import sweep

    _check_changes(given)
    rows = sweep(
        given.recipes,
        overrides=given.overrides,
        jobs=given.jobs,
        slurm=given.slurm,
        **_options_of_runs(given),
    )
    if given.json:
        print_json(rows)
    else:
        print_table("Runs", rows)
    states = {row["status"] for row in rows}
    return 2 if "refused" in states else int("broken" in states)


def _check_changes(given: argparse.Namespace) -> None:
    """Refuse unknown settings before any run begins, and warn of options that are not inherited."""
    from dlrnn.models import ModelConfig
    from dlrnn.paper import recipes
    from dlrnn.train import with_overrides

    if any(word.partition("=")[0] == "--seed" for word in given.overrides):
        raise ValueError("a sweep has --seeds N, for seeds 0 .. N-1, instead of --seed")
    try:
        found = recipes.chosen(given.recipes)
    except ValueError as error:
        if not given.overrides:
            raise
        order = "recipes come first: dlrnn sweep RECIPE ... --steps 100"
        raise ValueError(f"{error}; {order}") from None
    notes: dict[str, None] = {}
    for recipe in found if given.overrides else []:
        unchanged = recipes.scaled(recipe, given.scale)
        changed = with_overrides(unchanged, given.overrides)
        if isinstance(changed.model, ModelConfig):
            changed.model.check_mixer()
        notes |= dict.fromkeys(_not_inherited(unchanged, changed))
    for note in notes:
        warn(note)
