"""The command `dlrnn`: parsing and printing only. torch is imported when a command runs."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dlrnn._version import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; bad input ends in one sentence and exit status 2."""
    parser = _parser()
    given = parser.parse_args(arguments)
    try:
        status: int = given.run(given)
    except (ValueError, OSError, RuntimeError) as error:  # RuntimeError: red, or out of memory
        print(f"dlrnn {given.command}: {str(error).splitlines()[0]}", file=sys.stderr)
        return 1 if isinstance(error, RuntimeError) else 2
    return status


def _parser() -> argparse.ArgumentParser:
    text = "Diagonal linear RNNs: `from dlrnn import DLR`."
    parser = argparse.ArgumentParser(prog="dlrnn", description=text, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"dlrnn {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    doctor = _command(commands, "doctor", _doctor, "what this machine has, proven by running it")
    _device(doctor)

    bench = commands.add_parser("bench", help="measure speed and memory", allow_abbrev=False)
    cases = bench.add_subparsers(dest="case", required=True, metavar="WHAT")
    layer = _command(cases, "layer", _bench_layer, "the layer against the paper's listing")
    kernel = _command(cases, "kernel", _bench_kernel, "the kernel's accuracy at a long length")
    step = _command(cases, "step", _bench_step, "the cost of a step along a sequence")
    data = _command(cases, "data", _bench_data, "making a batch of each task against a step")
    sizes = ((layer, 64, 1024), (kernel, 4, 1024), (step, 64, 1024), (data, 128, 4096))
    for case, channels, states in sizes:
        _device(case)
        case.add_argument("--d-model", type=_count, default=channels, metavar="H")
        case.add_argument("--d-state", type=_count, default=states, metavar="N")
    for case, batch in ((layer, 4), (step, 1)):
        case.add_argument("--batch", type=_count, default=batch, metavar="B")
    for case, length, repeats in ((layer, 4096, 20), (kernel, 2**20, 3), (data, 4096, 3)):
        case.add_argument("--length", type=_count, default=length, metavar="L")
        case.add_argument("--repeats", type=_count, default=repeats)
    step.add_argument("--steps", type=_count, default=10000)

    tasks = commands.add_parser("tasks", help="the test-bed: a table, or a picture of a task")
    tasks.set_defaults(run=_tasks)
    tasks.add_argument("--json", action="store_true", help="print JSON instead of a table")
    pictures = tasks.add_subparsers(dest="picture", metavar="preview")
    preview = pictures.add_parser("preview", help="draw a sample", allow_abbrev=False)
    preview.add_argument("name", metavar="NAME")
    preview.add_argument("--out", type=Path, required=True, metavar="FILE.png")
    preview.add_argument("--length", type=_count, metavar="L", help="default: the paper's")
    preview.add_argument("--seed", type=int, default=0)
    preview.set_defaults(run=_preview)

    data = commands.add_parser("data", help="sets on disk: build, verify, list", allow_abbrev=False)
    actions = data.add_subparsers(dest="action", required=True, metavar="WHAT")
    build = actions.add_parser("build", help="make a set, or finish one", allow_abbrev=False)
    build.set_defaults(run=_data_build)
    build.add_argument("name", metavar="NAME", help="listops-subtrees or listops")
    build.add_argument("--samples", type=_count, help="default: the paper's 100000")
    build.add_argument("--workers", type=_count, help="processes; default: all cores")
    build.add_argument("--seed", type=int, default=0)
    build.add_argument("--out", type=Path, metavar="DIR", help="default: data/NAME")
    verify = actions.add_parser("verify", help="check every hash and count", allow_abbrev=False)
    verify.set_defaults(run=_data_verify)
    verify.add_argument("folder", type=Path, metavar="DIR")
    _command(actions, "list", _data_list, "the sets in data/")

    check = _command(commands, "check", _check, "whole = chunks = steps, on your own checkpoint")
    check.add_argument(
        "path",
        type=Path,
        nargs="?",
        metavar="RUN_OR_FILE",
        help="a .safetensors file or its folder; without it, new layers of every form",
    )
    check.add_argument("--length", type=_count, nargs="+", default=[64, 1000, 4096], metavar="L")
    check.add_argument("--cast", choices=("real", "prod"), help="if the file does not say")
    check.add_argument("--kernel-length", type=_count, help="if the file does not say")
    return parser


def _command(commands: Any, name: str, run: Any, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=text, allow_abbrev=False
    )
    parser.set_defaults(run=run)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser


def _device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", default=None, help="cpu or cuda; default: cuda where there is one"
    )


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _resolve(device: str | None) -> str:
    import torch

    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise ValueError(f"there is no device {device!r}: say cpu or cuda") from error
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"device {device!r} is not supported: say cpu or cuda")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError("cuda was asked for, and torch finds no CUDA device here")
    return device


# ---------------------------------------------------------------------------------- commands


def _doctor(given: argparse.Namespace) -> int:
    from dlrnn.doctor import environment, examine

    device = _resolve(given.device)
    facts, rows = environment(), examine(device)
    if given.json:
        _print_json({"environment": facts, "device": device, "ops": rows})
    else:
        for name, fact in facts.items():
            print(f"{name:>17}  {fact}")
        _print_table(f"Ops on {device}, each against its float64 definition", rows)
    return 0 if all(row["ok"] for row in rows) else 1


def _bench_layer(given: argparse.Namespace) -> int:
    from dlrnn.bench.layer import bench_layer

    sizes = _sizes(given, "batch", "d_model", "d_state", "length", "repeats")
    result = bench_layer(device=_resolve(given.device), **sizes)
    if given.json:
        return _print_json(result)
    rows = [{"layer": name, **result[name]} for name in ("dlrnn", "listing")]
    _print_table(f"Forward + backward, {_case(result)}", rows)
    print(
        f"{result['faster']:g} times as fast as the paper's listing, with"
        f" {result['memory_fraction']:.3g} of its extra memory"
    )
    return 0


def _bench_kernel(given: argparse.Namespace) -> int:
    from dlrnn.bench.kernel import bench_kernel

    sizes = _sizes(given, "d_model", "d_state", "length", "repeats")
    result = bench_kernel(device=_resolve(given.device), **sizes)
    if given.json:
        return _print_json(result)
    errors = result["errors"] | {"exp(k log lambda) in fp32": result["naive"]}
    rows = [{"fp32 against float64": name, "error": error} for name, error in errors.items()]
    _print_table(f"{_case(result)}, forward + backward {result['ms']:g} ms", rows)
    return 0


def _bench_data(given: argparse.Namespace) -> int:
    from dlrnn.bench.data import bench_data

    sizes = _sizes(given, "d_model", "d_state", "length", "repeats")
    result = bench_data(device=_resolve(given.device), **sizes)
    if given.json:
        return _print_json(result)
    _print_table(f"A batch, and the step that uses it: {_case(result)}", result["tasks"])
    _print_table("Sets on disk, made by one core", result["generators"])
    return 0


def _bench_step(given: argparse.Namespace) -> int:
    from dlrnn.bench.step import bench_step

    sizes = _sizes(given, "batch", "d_model", "d_state", "steps")
    result = bench_step(device=_resolve(given.device), **sizes)
    if given.json:
        return _print_json(result)
    print(
        f"a step takes {result['first_us']:g} us at the start and {result['last_us']:g} us"
        f" at the end of {given.steps} steps ({result['last_over_first']:g} times)"
    )
    return 0


def _sizes(given: argparse.Namespace, *names: str) -> dict[str, int]:
    return {name: getattr(given, name) for name in names}


def _case(result: dict[str, Any]) -> str:
    sizes = ", ".join(f"{letter} {size}" for letter, size in result["case"].items())
    return f"{sizes}, {result['device']}"


def _tasks(given: argparse.Namespace) -> int:
    from dlrnn.tasks import TASKS

    tasks = [kind() for kind in TASKS.values()]
    rows = [
        {
            "name": task.name,
            "reads": task.input_length,
            "predicts": f"{task.output_length} x {task.d_output}",
            "metric": task.metric,
            "probes": task.probes,
        }
        for task in tasks
    ]
    if given.json:
        return _print_json(rows)
    _print_table("Tasks, with the paper's settings", rows)
    return 0


def _preview(given: argparse.Namespace) -> int:
    from dlrnn.tasks import get

    if given.out.suffix != ".png":
        raise ValueError(f"{given.out}: the picture's name must end in .png")
    if not given.out.parent.is_dir():
        raise ValueError(f"{given.out}: there is no folder {given.out.parent}")
    settings = {} if given.length is None else {"length": given.length}
    get(given.name, seed=given.seed, **settings).preview().savefig(given.out, dpi=110)
    print(f"drawn: {given.out}")
    return 0


def _data_build(given: argparse.Namespace) -> int:
    from dlrnn.tasks import data_cli

    folder = data_cli.build(
        given.name, samples=given.samples, seed=given.seed, workers=given.workers, out=given.out
    )
    print(f"the set is in {folder}")
    return 0


def _data_verify(given: argparse.Namespace) -> int:
    from dlrnn.tasks import data_cli

    problems = data_cli.verify(given.folder)
    print("\n".join(problems) or f"{given.folder}: every hash and count is right")
    return 1 if problems else 0


def _data_list(given: argparse.Namespace) -> int:
    from dlrnn.tasks import data_cli

    rows = data_cli.found()
    if given.json:
        return _print_json(rows)
    if rows:
        _print_table("Sets", rows)
    else:
        print("no sets in data/: make one with `dlrnn data build listops-subtrees`")
    return 0


def _check(given: argparse.Namespace) -> int:
    from dlrnn.check import check_file, check_forms

    if given.path is None:
        if given.cast or given.kernel_length:
            raise ValueError("--cast and --kernel-length belong to a file: name one")
        rows = check_forms(given.length)
    else:
        rows = check_file(given.path, given.length, given.cast, given.kernel_length)
    if given.json:
        _print_json(rows)
    else:
        _print_table("Relative difference to the whole sequence", rows)
    return 0 if all(row["ok"] for row in rows) else 1


# ---------------------------------------------------------------------------------- printing


def _print_json(value: Any) -> int:
    print(json.dumps(value, indent=1))
    return 0


def _print_table(title: str, rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for name, value in rows[0].items():
        table.add_column(name, justify="left" if isinstance(value, str) else "right")
    for row in rows:
        table.add_row(*(_shown(value) for value in row.values()))
    print(title)
    Console().print(table)


def _shown(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "ok" if value else "FAILED"
    if isinstance(value, float):
        return f"{value:.1e}" if abs(value) < 1e-2 else f"{value:.4g}"
    return str(value)
