"""The commands `dlrnn tasks` and `dlrnn data`."""

import argparse
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dlrnn.cli import command, count, print_json, print_table, say

_IMPORTED = "text, retrieval, listops, pathfinder, path-x, speech-commands or pg19"
_GENERATED = "listops-subtrees, listops, pathfinder-segmentation, pathfinder or path-x"
_PIXELS = "side in pixels of pathfinder-segmentation; default: 128"


def add(commands: Any) -> None:
    """Add their parsers."""
    tasks = command(commands, "tasks", _tasks, "list the tasks, or draw a sample of one")
    pictures = tasks.add_subparsers(dest="picture", metavar="preview")
    preview = _action(pictures, "preview", _preview, "draw a sample with the task's definition")
    preview.add_argument("name", metavar="NAME")
    preview.add_argument("--out", type=Path, required=True, metavar="FILE.png")
    text = "default: 64 for the atomic tasks, otherwise the paper's length"
    preview.add_argument("--length", type=count, metavar="L", help=text)
    preview.add_argument("--resolution", type=count, help=_PIXELS)
    text = "of a data set on disk, which real data needs; default: generate a sample"
    preview.add_argument("--folder", type=Path, metavar="DIR", help=text)
    preview.add_argument("--seed", type=int, default=0)

    data = commands.add_parser(
        "data", help="data sets on disk: build, import, fetch, verify, list", allow_abbrev=False
    )
    actions = data.add_subparsers(dest="action", required=True, metavar="ACTION")
    build = _action(actions, "build", _data_build, "generate a data set, or complete one")
    build.add_argument("name", metavar="NAME", help=_GENERATED)
    build.add_argument("--resolution", type=count, help=_PIXELS)
    build.add_argument("--samples", type=count, help="at least 3; default: the whole data set")
    build.add_argument("--workers", type=count, help="processes; default: all cores")
    build.add_argument("--seed", type=int, default=0)
    import_ = _action(actions, "import", _data_import, "import a folder or an archive of files")
    import_.add_argument("name", metavar="NAME", help=_IMPORTED)
    import_.add_argument("path", type=Path, metavar="PATH")
    fetch = _action(actions, "fetch", _data_fetch, "download an official release and import it")
    fetch.add_argument("name", metavar="NAME", help=_IMPORTED)
    for parser in (import_, fetch):
        text = "a tokenizer.json, which pg19 needs: T5's in the paper"
        parser.add_argument("--tokenizer", type=Path, metavar="FILE", help=text)
    for parser in (build, import_, fetch):
        parser.add_argument("--out", type=Path, metavar="DIR", help="default: data/NAME")
    verify = _action(actions, "verify", _data_verify, "check every hash and count")
    verify.add_argument("folder", type=Path, metavar="DIR")
    command(actions, "list", _data_list, "list the data sets in data/")


def _action(
    actions: Any, name: str, run: Callable[[argparse.Namespace], int], text: str
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(
        name, help=text, description=text, allow_abbrev=False
    )
    parser.set_defaults(run=run, parser=parser)
    return parser


def _tasks(given: argparse.Namespace) -> int:
    from dlrnn.tasks import TASKS

    rows = [
        {
            "name": task.name,
            "kind": task.kind,
            "length": task.input_length,
            "answers": f"{task.output_length} x {task.d_output}",
            "metric": task.metric,
            "probes": task.probes,
            "definition": task.definition,
        }
        for task in (kind() for kind in TASKS.values())
    ]
    if given.json:
        return print_json(rows)
    texts = [f"{row['name']}: {row.pop('definition')}" for row in rows]
    print_table("Tasks with the paper's settings", rows)
    for text in texts:
        print(textwrap.fill(text, 100, subsequent_indent="  "))
    return 0


def _preview(given: argparse.Namespace) -> int:
    from dlrnn.tasks import TASKS, RegressionTask, get

    if given.out.suffix != ".png":
        raise ValueError(f"{given.out}: the picture's name must end in .png")
    if not given.out.parent.is_dir():
        raise ValueError(f"{given.out}: there is no folder {given.out.parent}")
    options = {name: getattr(given, name) for name in ("length", "resolution", "folder")}
    settings = {name: value for name, value in options.items() if value is not None}
    if issubclass(TASKS.get(given.name, object), RegressionTask):
        settings.setdefault("length", 64)
    get(given.name, seed=given.seed, **settings).preview().savefig(given.out, dpi=110)
    say(f"drawn: {given.out}")
    return 0


def _data_build(given: argparse.Namespace) -> int:
    from dlrnn.common.progress import Progress
    from dlrnn.tasks import data

    options = ("resolution", "samples", "seed", "workers", "out")
    settings = {name: getattr(given, name) for name in options}
    with Progress(given.name, "samples", quiet_seconds=10) as progress:
        folder = data.build(given.name, **settings, progress=progress.update)
    say(f"the set is in {folder}")
    return 0


def _data_import(given: argparse.Namespace) -> int:
    from dlrnn.common.progress import Progress
    from dlrnn.tasks import data
    from dlrnn.tasks.storage.shards import load_manifest

    options = {"tokenizer": given.tokenizer, "out": given.out}
    with Progress(given.name, "samples", quiet_seconds=10) as progress:
        folder = data.import_set(given.name, given.path, **options, progress=progress.update)
    if remark := load_manifest(folder).get("remark"):
        say(remark)
    say(f"the set is in {folder}")
    return 0


def _data_fetch(given: argparse.Namespace) -> int:
    from dlrnn.tasks.storage.fetch import download

    given.path = download(given.name)
    return _data_import(given)


def _data_verify(given: argparse.Namespace) -> int:
    from dlrnn.common.progress import Progress
    from dlrnn.tasks.storage.shards import verify

    with Progress("verify", "shards", quiet_seconds=10) as progress:
        problems = verify(given.folder, progress=progress.update)
    for line in problems or [f"{given.folder}: every hash and count is right"]:
        say(line)
    return 1 if problems else 0


def _data_list(given: argparse.Namespace) -> int:
    from dlrnn.tasks import data

    rows = data.list_sets()
    if given.json:
        return print_json(rows)
    if rows:
        print_table("Data sets", rows)
    else:
        print("no sets in data/: create one with `dlrnn data build listops-subtrees`")
    return 0
