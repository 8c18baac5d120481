"""`dlrnn doctor` and `dlrnn check`."""

import argparse
from pathlib import Path
from typing import Any

from dlrnn.cli import command, count, device_option, print_json, print_table, resolve, say


def add(commands: Any) -> None:
    """Add the parsers of `dlrnn doctor` and `dlrnn check`."""
    doctor = command(
        commands,
        "doctor",
        _doctor,
        "versions, devices and backends of this machine, each op run once",
    )
    device_option(doctor)

    check = command(
        commands,
        "check",
        _check,
        "whether a checkpoint gives the same answer whole, in chunks and in steps",
    )
    check.add_argument(
        "path",
        type=Path,
        nargs="?",
        metavar="RUN_OR_FILE",
        help="a .safetensors file or its folder; without it, new layers of every form",
    )
    check.add_argument("--length", type=count, nargs="+", default=[64, 1000, 4096], metavar="L")
    check.add_argument("--cast", choices=("real", "prod"), help="for a file without it")
    check.add_argument("--kernel-length", type=count, help="for a file without it")


def _doctor(given: argparse.Namespace) -> int:
    from dlrnn.bench.doctor import environment, examine

    device = resolve(given.device)
    facts, rows = environment(), examine(device)
    if given.json:
        print_json({"environment": facts, "device": device, "ops": rows})
    else:
        for name, fact in facts.items():
            say(f"{name:>17}  {fact}")
        print_table(f"Ops on {device}, each against its float64 definition", rows)
    return 0 if all(row["ok"] for row in rows) else 1


def _check(given: argparse.Namespace) -> int:
    from dlrnn.bench.check import check_file, check_forms

    if given.path is None:
        if given.cast or given.kernel_length:
            raise ValueError("--cast and --kernel-length belong to a file: name one")
        rows = check_forms(given.length)
    else:
        rows = check_file(given.path, given.length, given.cast, given.kernel_length)
    if given.json:
        print_json(rows)
    else:
        print_table("Relative difference to the whole sequence", rows)
    return 0 if all(row["ok"] for row in rows) else 1
