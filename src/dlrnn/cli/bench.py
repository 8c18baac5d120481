"""`dlrnn bench`."""

import argparse
from collections.abc import Callable
from typing import Any

from dlrnn.cli import command, count, device_option, print_json, print_table, resolve


def add(commands: Any) -> None:
    """Add the parsers of `dlrnn bench`."""
    bench = commands.add_parser("bench", help="measure speed and memory", allow_abbrev=False)
    cases = bench.add_subparsers(dest="case", required=True, metavar="WHAT")

    def case(name: str, run: Any, text: str, **sizes: int) -> argparse.ArgumentParser:
        """A measurement on a device, with options for its sizes."""
        parser = command(cases, name, run, text)
        device_option(parser)
        for size, default in sizes.items():
            option = "--" + size.replace("_", "-")
            shown: dict[str, Any] = {"metavar": _LETTERS.get(size), "help": _HELP.get(size)}
            parser.add_argument(option, type=count, default=default, **shown)
        return parser

    text = "the layer against the paper's listing"
    sizes = {"d_model": 64, "d_state": 1024, "batch": 4, "length": 4096, "repeats": 20, "factor": 1}
    layer = case("layer", _bench_layer, text, **sizes)
    instead = layer.add_mutually_exclusive_group()
    instead.add_argument("--all", action="store_true", help="instead: all of the paper's sizes")
    text = "instead: a layer of 16 channels and states, whose time is that of Python, on the CPU"
    instead.add_argument("--tiny", action="store_true", help=text)
    text = "the convolution alone, at the paper's sizes"
    case("conv", _bench_conv, text, repeats=10, factor=1)
    text = "a layer of every mixer, from 256 to 2^18 positions"
    case("lengths", _bench_lengths, text, repeats=10, factor=1)
    text = "the kernel's accuracy at a long length"
    case("kernel", _bench_kernel, text, d_model=4, d_state=1024, length=2**20, repeats=3)
    text = "the cost of a step along a sequence"
    sizes = {"d_model": 64, "d_state": 1024, "batch": 1, "steps": 10000, "repeats": 10}
    step = case("step", _bench_step, text, **sizes)
    text = "instead: a training step of every model of Tables 1, 3 and 6, relative to DLR"
    step.add_argument("--tables", action="store_true", help=text)
    step.add_argument("--scale", choices=("full", "tiny"), default="full", help="of --tables")
    text = "making a batch of each task against a step"
    case("data", _bench_data, text, d_model=128, d_state=4096, length=4096, repeats=3)
    text = "the cost of a token of the language model with DLR and with attention"
    sizes = {"prompt": 4096, "tokens": 4096, "layers": 16, "experts": 1, "batch": 1, "factor": 1}
    case("generate", _bench_generate, text, **sizes)


_LETTERS = {"d_model": "H", "d_state": "N", "batch": "B", "length": "L"}
_HELP = {
    "factor": "divide the paper's sizes by this (of a layer: with --all)",
    "repeats": "timed calls (of a step: with --tables)",
}


def _report(
    given: argparse.Namespace, result: dict[str, Any], show: Callable[[dict[str, Any]], None]
) -> int:
    if given.json:
        return print_json(result)
    show(result)
    return 0


def _bench_layer(given: argparse.Namespace) -> int:
    from dlrnn.bench.layer import bench_layer, bench_tiny

    if given.all:
        from dlrnn.bench.cases import bench_cases

        return _print_cases(given, bench_cases)
    if given.factor > 1:
        raise ValueError("--factor belongs to --all; else use --length and --d-state")
    if given.tiny:
        if given.device not in (None, "cpu"):
            raise ValueError(f"--tiny measures on the CPU, not on {given.device}")
        for name in ("batch", "d_model", "d_state", "length"):
            if getattr(given, name) != given.parser.get_default(name):
                raise ValueError(f"--tiny has its own sizes: leave out --{name.replace('_', '-')}")
        return _report(given, bench_tiny(repeats=max(given.repeats, TINY_REPEATS)), _show_layer)
    sizes = _sizes(given, "batch", "d_model", "d_state", "length", "repeats")
    return _report(given, bench_layer(device=resolve(given.device), **sizes), _show_layer)


TINY_REPEATS = 500
"""Rounds of `--tiny`, at least: each takes about 2 ms."""


def _show_layer(result: dict[str, Any]) -> None:
    rows = [{"layer": name, **result[name]} for name in ("dlrnn", "listing")]
    print_table(f"Forward + backward, {_case(result)}", rows)
    print(
        f"{result['faster']:g} times as fast as the paper's listing (it takes {result['ratio']:g}"
        f" of its time), with {result['memory_fraction']:.3g} of its extra memory"
    )


def _bench_conv(given: argparse.Namespace) -> int:
    from dlrnn.bench.cases import bench_conv

    return _print_cases(given, bench_conv)


def _print_cases(given: argparse.Namespace, bench: Any) -> int:
    result = bench(device=resolve(given.device), repeats=given.repeats, factor=given.factor)
    names = {name: None for row in result["cases"] for name in row}
    rows = [{name: row.get(name) for name in names} for row in result["cases"]]
    return _report(given, result, lambda result: print_table(_case(result), rows))


def _bench_lengths(given: argparse.Namespace) -> int:
    from dlrnn.bench.cases import bench_lengths

    device = resolve(given.device)
    result = bench_lengths(device=device, repeats=given.repeats, factor=given.factor)
    return _report(given, result, _show_lengths)


def _show_lengths(result: dict[str, Any]) -> None:
    lengths = [row["L"] for row in result["cases"]]
    by_name: dict[str, dict[int, float | None]] = {}
    for row in result["cases"]:
        for name in row.keys() - {"case", "B", "L"}:
            by_name.setdefault(name, {})[row["L"]] = row[name]
    times = sorted(name for name in by_name if not name.endswith((" error", " GiB")))
    rows = [{"length": n, **{str(L): by_name[n].get(L) for L in lengths}} for n in times]
    print_table(_case(result), rows)
    errors = [e for n, of in by_name.items() if n.endswith(" error") for e in of.values() if e]
    print(f"the largest error against float64 is {max(errors):.1e}")


def _bench_kernel(given: argparse.Namespace) -> int:
    from dlrnn.bench.layer import bench_kernel

    sizes = _sizes(given, "d_model", "d_state", "length", "repeats")
    return _report(given, bench_kernel(device=resolve(given.device), **sizes), _show_kernel)


def _show_kernel(result: dict[str, Any]) -> None:
    errors = result["errors"] | {"exp(k log lambda) in fp32": result["naive"]}
    rows = [{"fp32 against float64": name, "error": error} for name, error in errors.items()]
    print_table(f"{_case(result)}, forward + backward {result['ms']:g} ms", rows)


def _bench_step(given: argparse.Namespace) -> int:
    from dlrnn.bench.layer import bench_step

    if given.tables:
        return _bench_tables(given)
    sizes = _sizes(given, "batch", "d_model", "d_state", "steps")
    return _report(given, bench_step(device=resolve(given.device), **sizes), _show_step)


def _show_step(result: dict[str, Any]) -> None:
    print(
        f"a step takes {result['first_us']:g} us at the start and {result['last_us']:g} us"
        f" at the end of {result['case']['steps']} steps ({result['last_over_first']:g} times)"
    )


def _bench_tables(given: argparse.Namespace) -> int:
    from dlrnn.bench.tables import bench_tables

    device = resolve(given.device)
    result = bench_tables(device=device, scale=given.scale, repeats=given.repeats)
    return _report(given, result, _show_tables)


def _show_tables(result: dict[str, Any]) -> None:
    print_table(f"A training step, {_case(result)}", result["models"])
    print_table("Table 3", result["table3"])
    if loop := result["loop"]:
        print(
            f"the training loop adds {loop['overhead']:.1%} to a step"
            f" ({loop['loop_ms']:g} against {loop['bare_ms']:g} ms of bare PyTorch)"
        )


def _bench_data(given: argparse.Namespace) -> int:
    from dlrnn.bench.data import bench_data

    sizes = _sizes(given, "d_model", "d_state", "length", "repeats")
    return _report(given, bench_data(device=resolve(given.device), **sizes), _show_data)


def _show_data(result: dict[str, Any]) -> None:
    print_table(f"A batch, and the step that uses it: {_case(result)}", result["tasks"])
    print_table("Sets on disk, made by one core", result["generators"])


def _bench_generate(given: argparse.Namespace) -> int:
    from dlrnn.bench.generate import bench_generate

    sizes = _sizes(given, "prompt", "tokens", "layers", "experts", "batch")
    for name in ("prompt", "tokens"):
        sizes[name] = max(1, sizes[name] // given.factor)
    return _report(given, bench_generate(device=resolve(given.device), **sizes), _show_generate)


def _show_generate(result: dict[str, Any]) -> None:
    print_table(f"A token after a prompt, {_case(result)}", result["tokens"])
    for mixer, growth in result["last_over_first"].items():
        print(f"{mixer}: a token costs {growth:g} times as much at the end as at the start")


def _sizes(given: argparse.Namespace, *names: str) -> dict[str, int]:
    return {name: getattr(given, name) for name in names}


def _case(result: dict[str, Any]) -> str:
    sizes = ", ".join(f"{letter} {size}" for letter, size in result["case"].items())
    return f"{sizes}, {result['device']}"
