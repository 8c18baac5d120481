"""`dlrnn bench`."""

import argparse
from importlib import import_module
from inspect import signature
from typing import Any

from dlrnn.cli import command, count, device_option, print_json, print_table, resolve

_LETTERS = {"d_model": "H", "d_state": "N", "batch": "B", "length": "L"}
_HELP = {
    "factor": "divide the paper's sizes by this number",
    "repeats": "how many calls are timed",
}
TINY_REPEATS = 500
"""Rounds of `--tiny`, at least: each takes about 2 ms."""


def add(commands: Any) -> None:
    """Add the parsers of `dlrnn bench`."""
    bench = commands.add_parser("bench", help="measure speed and memory", allow_abbrev=False)
    cases = bench.add_subparsers(dest="case", required=True, metavar="WHAT")

    def case(name: str, measure: str, text: str, **sizes: int) -> argparse.ArgumentParser:
        """A function of dlrnn.bench, with options for its sizes."""
        parser = command(cases, name, _run, text)
        parser.set_defaults(measure=measure)
        device_option(parser)
        for size, default in sizes.items():
            option = "--" + size.replace("_", "-")
            shown: dict[str, Any] = {"metavar": _LETTERS.get(size), "help": _HELP.get(size)}
            parser.add_argument(option, type=count, default=default, **shown)
        return parser

    sizes = {"d_model": 64, "d_state": 1024, "batch": 4, "length": 4096, "repeats": 20, "factor": 1}
    layer = case("layer", "layer.bench_layer", "the layer against the paper's listing", **sizes)
    modes = layer.add_mutually_exclusive_group()
    tiny = "a small layer (H = N = 16) on the CPU, whose time is mostly Python's overhead"
    _instead(modes, "--all", "cases.bench_cases", "all of the paper's sizes")
    _instead(modes, "--tiny", "layer.bench_tiny", tiny)
    _instead(modes, "--eager", "cases.bench_eager", "calls in a Python loop, and CUDA graphs")
    text = "the convolution alone, at the paper's sizes"
    case("conv", "cases.bench_conv", text, repeats=10, factor=1)
    text = "a layer of every mixer, from 256 to 2^18 positions"
    case("lengths", "cases.bench_lengths", text, repeats=10, factor=1)
    sizes = {"d_model": 4, "d_state": 1024, "length": 2**20, "repeats": 3}
    case("kernel", "layer.bench_kernel", "the kernel's accuracy at a long length", **sizes)
    sizes = {"d_model": 64, "d_state": 1024, "batch": 1, "steps": 10000, "repeats": 10, "factor": 1}
    step = case("step", "layer.bench_step", "the cost of a step along a sequence", **sizes)
    modes = step.add_mutually_exclusive_group()
    text = "a training step of every model of Tables 1, 3 and 6, relative to DLR"
    _instead(modes, "--tables", "tables.bench_tables", text)
    text = "a streaming step of the language model's layers, beside attention"
    _instead(modes, "--peers", "streaming.bench_peers", text)
    step.add_argument("--scale", choices=("full", "tiny"), default="full", help="of --tables")
    sizes = {"d_model": 128, "d_state": 4096, "length": 4096, "repeats": 3}
    case("data", "data.bench_data", "making a batch of each task against a step", **sizes)
    text = "the cost of a token of the language model with DLR and with attention"
    sizes = {"prompt": 4096, "tokens": 4096, "layers": 16, "experts": 1, "batch": 1, "factor": 1}
    case("generate", "generate.bench_generate", text, **sizes)


def _instead(parser: Any, option: str, measure: str, text: str) -> None:
    """An option that chooses another function."""
    options = {"dest": "measure", "const": measure, "help": f"instead: {text}"}
    parser.add_argument(option, action="store_const", **options)


def _run(given: argparse.Namespace) -> int:
    """Call the chosen function with the options that it takes; print what it measured."""
    module, _, name = given.measure.partition(".")
    _check_layer(given, name)
    measure = getattr(import_module(f"dlrnn.bench.{module}"), name)
    takes = signature(measure).parameters
    options = {name: value for name, value in vars(given).items() if name in takes}
    if "device" in takes:
        options["device"] = resolve(given.device)
    result = measure(**options)
    if given.json:
        return print_json(result)
    _SHOW.get(name, _show_cases)(result)
    return 0


def _check_layer(given: argparse.Namespace, name: str) -> None:
    """Raise for options of `dlrnn bench layer` that the chosen function ignores."""
    if name == "bench_layer" and given.factor > 1:
        raise ValueError("--factor belongs to --all and --eager; else use --length and --d-state")
    if name != "bench_tiny":
        return
    if given.device not in (None, "cpu"):
        raise ValueError(f"--tiny measures on the CPU, not on {given.device}")
    for size in ("batch", "d_model", "d_state", "length"):
        if getattr(given, size) != given.parser.get_default(size):
            raise ValueError(f"--tiny has its own sizes: leave out --{size.replace('_', '-')}")
    given.repeats = max(given.repeats, TINY_REPEATS)


# ---------------------------------------------------------------------------------- tables


def _show_cases(result: dict[str, Any]) -> None:
    names = {name: None for row in result["cases"] for name in row}
    rows = [{name: row.get(name) for name in names} for row in result["cases"]]
    print_table(_case(result), rows)


def _show_layer(result: dict[str, Any]) -> None:
    rows = [{"layer": name, **result[name]} for name in ("dlrnn", "listing")]
    print_table(f"Forward + backward, {_case(result)}", rows)
    print(
        f"{result['faster']:g} times as fast as the paper's listing (it takes {result['ratio']:g}"
        f" of its time), with {result['memory_fraction']:.3g} of its extra memory"
    )


def _show_lengths(result: dict[str, Any]) -> None:
    names = {name for row in result["cases"] for name in row} - {"case", "B", "L"}
    times = sorted(name for name in names if not name.endswith((" error", " GiB")))
    rows = [
        {"length": name, **{str(row["L"]): row.get(name) for row in result["cases"]}}
        for name in times
    ]
    print_table(_case(result), rows)
    errors = [row.get(name) or 0 for row in result["cases"] for name in names if "error" in name]
    print(f"the largest error against float64 is {max(errors):.1e}")


def _show_kernel(result: dict[str, Any]) -> None:
    errors = result["errors"] | {"exp(k log lambda) in fp32": result["naive"]}
    rows = [{"fp32 against float64": name, "error": error} for name, error in errors.items()]
    print_table(f"{_case(result)}, forward + backward {result['ms']:g} ms", rows)


def _show_step(result: dict[str, Any]) -> None:
    print(
        f"a step takes {result['first_us']:g} us at the start and {result['last_us']:g} us"
        f" at the end of {result['case']['steps']} steps ({result['last_over_first']:g} times)"
    )


def _show_peers(result: dict[str, Any]) -> None:
    print_table(f"A step after a state, {_case(result)}", result["steps"])


def _show_tables(result: dict[str, Any]) -> None:
    print_table(f"A training step, {_case(result)}", result["models"])
    print_table("Table 3", result["table3"])
    if result["table5"]:
        print_table("Table 5: throughput", result["table5"])
    if loop := result["loop"]:
        print(
            f"the training loop adds {loop['overhead']:.1%} to a step"
            f" ({loop['loop_ms']:g} against {loop['bare_ms']:g} ms of bare PyTorch)"
        )


def _show_data(result: dict[str, Any]) -> None:
    print_table(f"A batch, and the step that uses it: {_case(result)}", result["tasks"])
    print_table("Sets on disk, made by one core", result["generators"])


def _show_generate(result: dict[str, Any]) -> None:
    print_table(f"A token after a prompt, {_case(result)}", result["tokens"])
    shown = ", ".join(f"{name[:-3]} {ms:g} ms" for name, ms in result["prompt"].items())
    print(f"the prompt: {shown}")
    for mixer, growth in result["last_over_first"].items():
        print(f"{mixer}: a token costs {growth:g} times as much at the end as at the start")


def _case(result: dict[str, Any]) -> str:
    sizes = ", ".join(f"{letter} {size}" for letter, size in result["case"].items())
    return f"{sizes}, {result['device']}"


_SHOW = {
    **{"bench_layer": _show_layer, "bench_tiny": _show_layer, "bench_lengths": _show_lengths},
    **{"bench_kernel": _show_kernel, "bench_step": _show_step, "bench_tables": _show_tables},
    **{"bench_data": _show_data, "bench_generate": _show_generate, "bench_peers": _show_peers},
}
