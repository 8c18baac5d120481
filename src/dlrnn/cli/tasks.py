"""`dlrnn tasks` and `dlrnn data`."""

import argparse
from pathlib import Path
from typing import Any

from dlrnn.cli.shared import command, count, print_json, print_table, say

_REAL = "text, retrieval, listops, pathfinder, path-x, speech-commands or pg19"


def add(commands: Any) -> None:
    """Their parsers."""
    tasks = commands.add_parser("tasks", help="the test-bed: a table, or a picture of a task")
    tasks.set_defaults(run=_tasks, parser=tasks)
    tasks.add_argument("--json", action="store_true", help="print JSON instead of a table")
    pictures = tasks.add_subparsers(dest="picture", metavar="preview")
    preview = pictures.add_parser("preview", help="draw a sample", allow_abbrev=False)
    preview.add_argument("name", metavar="NAME")
    preview.add_argument("--out", type=Path, required=True, metavar="FILE.png")
    preview.add_argument("--length", type=count, metavar="L", help="default: the paper's")
    preview.add_argument("--resolution", type=count, help="of pathfinder-segmentation: 128")
    text = "of a set on disk, which real data needs; default: drawn on the spot"
    preview.add_argument("--folder", type=Path, metavar="DIR", help=text)
    preview.add_argument("--seed", type=int, default=0)
    preview.set_defaults(run=_preview, parser=preview)

    data = commands.add_parser(
        "data", help="sets on disk: build, import, fetch, verify, list", allow_abbrev=False
    )
    actions = data.add_subparsers(dest="action", required=True, metavar="WHAT")
    build = actions.add_parser("build", help="make a set, or finish one", allow_abbrev=False)
    build.set_defaults(run=_data_build, parser=build)
    build.add_argument(
        "name",
        metavar="NAME",
        help="listops-subtrees, listops, pathfinder-segmentation, pathfinder or path-x",
    )
    build.add_argument("--resolution", type=count, help="of pathfinder-segmentation: 128")
    build.add_argument("--samples", type=count, help="at least 3; default: all of it")
    build.add_argument("--workers", type=count, help="processes; default: all cores")
    build.add_argument("--seed", type=int, default=0)
    build.add_argument("--out", type=Path, metavar="DIR", help="default: data/NAME")
    text = "make a set of what you have: a folder or an archive"
    imported = actions.add_parser("import", help=text, description=text, allow_abbrev=False)
    imported.set_defaults(run=_data_import, parser=imported)
    imported.add_argument("name", metavar="NAME", help=_REAL)
    imported.add_argument("path", type=Path, metavar="PATH")
    text = "a tokenizer.json, which pg19 needs: T5's in the paper"
    imported.add_argument("--tokenizer", type=Path, metavar="FILE", help=text)
    imported.add_argument("--out", type=Path, metavar="DIR", help="default: data/NAME")
    text = "download an official release and import it"
    fetch = actions.add_parser("fetch", help=text, description=text, allow_abbrev=False)
    fetch.set_defaults(run=_data_fetch, parser=fetch)
    fetch.add_argument("name", metavar="NAME", help=_REAL)
    fetch.add_argument("--tokenizer", type=Path, metavar="FILE", help="as for import")
    fetch.add_argument("--out", type=Path, metavar="DIR", help="default: data/NAME")
    verify = actions.add_parser("verify", help="check every hash and count", allow_abbrev=False)
    verify.set_defaults(run=_data_verify, parser=verify)
    verify.add_argument("folder", type=Path, metavar="DIR")
    command(actions, "list", _data_list, "the sets in data/")


def _tasks(given: argparse.Namespace) -> int:
    from dlrnn.tasks import TASKS

    tasks = [kind() for kind in TASKS.values()]
    rows = [
        {
            "name": task.name,
            "kind": task.kind,
            "length": task.input_length,
            "answers": f"{task.output_length} x {task.d_output}",
            "metric": task.metric,
            "probes": task.probes,
        }
        for task in tasks
    ]
    if given.json:
        return print_json(rows)
    print_table("Tasks, with the paper's settings", rows)
    return 0


def _preview(given: argparse.Namespace) -> int:
    from dlrnn.tasks import get

    if given.out.suffix != ".png":
        raise ValueError(f"{given.out}: the picture's name must end in .png")
    if not given.out.parent.is_dir():
        raise ValueError(f"{given.out}: there is no folder {given.out.parent}")
    given_settings = {name: getattr(given, name) for name in ("length", "resolution", "folder")}
    settings = {name: value for name, value in given_settings.items() if value is not None}
    get(given.name, seed=given.seed, **settings).preview().savefig(given.out, dpi=110)
    say(f"drawn: {given.out}")
    return 0


def _data_build(given: argparse.Namespace) -> int:
    from dlrnn.tasks import data_cli

    options = ("resolution", "samples", "seed", "workers", "out")
    folder = data_cli.build(given.name, **{name: getattr(given, name) for name in options})
    say(f"the set is in {folder}")
    return 0


def _data_import(given: argparse.Namespace) -> int:
    from dlrnn.tasks import data_cli

    options = {"tokenizer": given.tokenizer, "out": given.out}
    return _said(data_cli.import_(given.name, given.path, **options))


def _data_fetch(given: argparse.Namespace) -> int:
    from dlrnn.tasks import data_cli

    return _said(data_cli.fetch(given.name, tokenizer=given.tokenizer, out=given.out))


def _said(folder: Path) -> int:
    from dlrnn.tasks.shards import load_manifest

    if remark := load_manifest(folder).get("remark"):
        say(remark)
    say(f"the set is in {folder}")
    return 0


def _data_verify(given: argparse.Namespace) -> int:
    from dlrnn.tasks import data_cli

    problems = data_cli.verify(given.folder)
    for line in problems or [f"{given.folder}: every hash and count is right"]:
        say(line)
    return 1 if problems else 0


def _data_list(given: argparse.Namespace) -> int:
    from dlrnn.tasks import data_cli

    rows = data_cli.found()
    if given.json:
        return print_json(rows)
    if rows:
        print_table("Sets", rows)
    else:
        print("no sets in data/: make one with `dlrnn data build listops-subtrees`")
    return 0
