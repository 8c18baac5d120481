"""`dlrnn bench`."""

import argparse
from typing import Any

from dlrnn.cli.shared import command, count, device_option, print_json, print_table, resolve


def add(commands: Any) -> None:
    """Its parsers."""
    bench = commands.add_parser("bench", help="measure speed and memory", allow_abbrev=False)
    cases = bench.add_subparsers(dest="case", required=True, metavar="WHAT")
    layer = command(cases, "layer", _bench_layer, "the layer against the paper's listing")
    conv = command(cases, "conv", _bench_conv, "the convolution alone, at the paper's sizes")
    lengths = command(
        cases, "lengths", _bench_lengths, "a layer of every mixer, from 256 to 2^18 positions"
    )
    kernel = command(cases, "kernel", _bench_kernel, "the kernel's accuracy at a long length")
    step = command(cases, "step", _bench_step, "the cost of a step along a sequence")
    data = command(cases, "data", _bench_data, "making a batch of each task against a step")
    tuned = command(cases, "tuning", _bench_tuning, "the plans of kernels that have a choice")
    device_option(tuned)
    text = "keep this GPU's choices in such a table: src/dlrnn/ops/tuned.json"
    tuned.add_argument("--write", metavar="FILE", help=text)
    text = "the cost of a token of the language model, DLR beside attention"
    generated = command(cases, "generate", _bench_generate, text)
    device_option(generated)
    for name, size in (("prompt", 4096), ("tokens", 4096), ("layers", 16)):
        generated.add_argument(f"--{name}", type=count, default=size)
    generated.add_argument("--experts", type=count, default=1)
    generated.add_argument("--batch", type=count, default=1, metavar="B")
    text = "prompt and tokens, so much fewer"
    generated.add_argument("--factor", type=count, default=1, help=text)
    sizes = ((layer, 64, 1024), (kernel, 4, 1024), (step, 64, 1024), (data, 128, 4096))
    for case, channels, states in sizes:
        device_option(case)
        case.add_argument("--d-model", type=count, default=channels, metavar="H")
        case.add_argument("--d-state", type=count, default=states, metavar="N")
    for case, batch in ((layer, 4), (step, 1)):
        case.add_argument("--batch", type=count, default=batch, metavar="B")
    for case, length, repeats in ((layer, 4096, 20), (kernel, 2**20, 3), (data, 4096, 3)):
        case.add_argument("--length", type=count, default=length, metavar="L")
        case.add_argument("--repeats", type=count, default=repeats)
    layer.add_argument("--all", action="store_true", help="instead: all of the paper's sizes")
    for case in (conv, lengths):
        device_option(case)
        case.add_argument("--repeats", type=count, default=10)
    for case in (layer, conv, lengths):
        case.add_argument(
            "--factor", type=count, default=1, help="the paper's sizes, so much smaller"
        )
    step.add_argument("--steps", type=count, default=10000)
    text = "instead: a training step of every model of Tables 1, 3 and 6, relative to DLR"
    step.add_argument("--tables", action="store_true", help=text)
    step.add_argument("--scale", choices=("full", "tiny"), default="full", help="of --tables")
    step.add_argument("--repeats", type=count, default=10, help="of --tables")


def _bench_layer(given: argparse.Namespace) -> int:
    from dlrnn.bench.layer import bench_layer

    if given.all:
        from dlrnn.bench.cases import bench_cases

        return _print_cases(given, bench_cases)
    if given.factor > 1:
        raise ValueError("--factor is for --all; here --length and --d-state say the sizes")
    sizes = _sizes(given, "batch", "d_model", "d_state", "length", "repeats")
    result = bench_layer(device=resolve(given.device), **sizes)
    if given.json:
        return print_json(result)
    rows = [{"layer": name, **result[name]} for name in ("dlrnn", "listing")]
    print_table(f"Forward + backward, {_case(result)}", rows)
    print(
        f"{result['faster']:g} times as fast as the paper's listing, with"
        f" {result['memory_fraction']:.3g} of its extra memory"
    )
    return 0


def _bench_conv(given: argparse.Namespace) -> int:
    from dlrnn.bench.cases import bench_conv

    return _print_cases(given, bench_conv)


def _bench_lengths(given: argparse.Namespace) -> int:
    from dlrnn.bench.lengths import bench_lengths

    device = resolve(given.device)
    result = bench_lengths(device=device, repeats=given.repeats, factor=given.factor)
    if given.json:
        return print_json(result)
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
    return 0


def _print_cases(given: argparse.Namespace, bench: Any) -> int:
    device = resolve(given.device)
    result = bench(device=device, repeats=given.repeats, factor=given.factor)
    if given.json:
        return print_json(result)
    names = {name: None for row in result["cases"] for name in row}
    rows = [{name: row.get(name) for name in names} for row in result["cases"]]
    print_table(_case(result), rows)
    return 0


def _bench_kernel(given: argparse.Namespace) -> int:
    from dlrnn.bench.kernel import bench_kernel

    sizes = _sizes(given, "d_model", "d_state", "length", "repeats")
    result = bench_kernel(device=resolve(given.device), **sizes)
    if given.json:
        return print_json(result)
    errors = result["errors"] | {"exp(k log lambda) in fp32": result["naive"]}
    rows = [{"fp32 against float64": name, "error": error} for name, error in errors.items()]
    print_table(f"{_case(result)}, forward + backward {result['ms']:g} ms", rows)
    return 0


def _bench_data(given: argparse.Namespace) -> int:
    from dlrnn.bench.data import bench_data

    sizes = _sizes(given, "d_model", "d_state", "length", "repeats")
    result = bench_data(device=resolve(given.device), **sizes)
    if given.json:
        return print_json(result)
    print_table(f"A batch, and the step that uses it: {_case(result)}", result["tasks"])
    print_table("Sets on disk, made by one core", result["generators"])
    return 0


def _bench_tuning(given: argparse.Namespace) -> int:
    from dlrnn.bench.tuning import bench_tuning, write_table

    result = bench_tuning(device=resolve(given.device))
    if given.write:
        write_table(given.write, result["table"])
    if given.json:
        return print_json(result)
    print_table(f"Plans, {_case(result)}", result["kernels"])
    return 0


def _bench_generate(given: argparse.Namespace) -> int:
    from dlrnn.bench.generate import bench_generate

    sizes = _sizes(given, "prompt", "tokens", "layers", "experts", "batch")
    for name in ("prompt", "tokens"):
        sizes[name] = max(1, sizes[name] // given.factor)
    result = bench_generate(device=resolve(given.device), **sizes)
    if given.json:
        return print_json(result)
    print_table(f"A token after a prompt, {_case(result)}", result["tokens"])
    for mixer, growth in result["last_over_first"].items():
        print(f"{mixer}: a token costs {growth:g} times as much at the end as at the start")
    return 0


def _bench_step(given: argparse.Namespace) -> int:
    from dlrnn.bench.step import bench_step

    if given.tables:
        return _bench_tables(given)
    sizes = _sizes(given, "batch", "d_model", "d_state", "steps")
    result = bench_step(device=resolve(given.device), **sizes)
    if given.json:
        return print_json(result)
    print(
        f"a step takes {result['first_us']:g} us at the start and {result['last_us']:g} us"
        f" at the end of {given.steps} steps ({result['last_over_first']:g} times)"
    )
    return 0


def _bench_tables(given: argparse.Namespace) -> int:
    from dlrnn.bench.tables import bench_tables

    device = resolve(given.device)
    result = bench_tables(device=device, scale=given.scale, repeats=given.repeats)
    if given.json:
        return print_json(result)
    print_table(f"A training step, {_case(result)}", result["models"])
    print_table("Table 3", result["table3"])
    if loop := result["loop"]:
        print(
            f"the loop's own share: {loop['overhead']:.1%}"
            f" ({loop['loop_ms']:g} against {loop['bare_ms']:g} ms of bare PyTorch)"
        )
    return 0


def _sizes(given: argparse.Namespace, *names: str) -> dict[str, int]:
    return {name: getattr(given, name) for name in names}


def _case(result: dict[str, Any]) -> str:
    sizes = ", ".join(f"{letter} {size}" for letter, size in result["case"].items())
    return f"{sizes}, {result['device']}"
