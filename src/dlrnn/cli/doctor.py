"""`dlrnn doctor`."""

import argparse
from pathlib import Path
from typing import Any

from dlrnn.cli import command, count, device_option, print_json, print_table, resolve, say


def add(commands: Any) -> None:
    """Add the parser of `dlrnn doctor`."""
    text = "check this machine: each op once, and layers whole, in chunks and in steps"
    doctor = command(commands, "doctor", _doctor, text)
    text = "check only these layers: a .safetensors file, its folder, or a run"
    doctor.add_argument("path", type=Path, nargs="?", metavar="RUN_OR_FILE", help=text)
    text = "lengths of the sequences; default: 64 300, and 64 1000 4096 for a file"
    doctor.add_argument("--length", type=count, nargs="+", metavar="L", help=text)
    doctor.add_argument("--cast", choices=("real", "prod"), help="if the file does not say")
    doctor.add_argument("--kernel-length", type=count, help="the same")
    device_option(doctor)


def _doctor(given: argparse.Namespace) -> int:
    from dlrnn.bench import doctor

    device, options = (
        resolve(given.device),
        {"cast": given.cast, "kernel_length": given.kernel_length},
    )
    report: dict[str, Any] = {"device": device}
    if given.path is not None:
        layers = doctor.saved_layers(given.path, **options)
        report["layers"] = doctor.compare(layers, given.length or [64, 1000, 4096], device)
    elif any(options.values()):
        raise ValueError("--cast and --kernel-length belong to a file: name one")
    else:
        report |= {"environment": doctor.environment(), "ops": doctor.examine(device)}
        if all(row["ok"] for row in report["ops"]):
            layers = doctor.new_layers()
            report["layers"] = doctor.compare(layers, given.length or [64, 300], device)
    rows = [*report.get("ops", []), *report.get("layers", [])]
    if given.json:
        print_json(report)
    else:
        _show(report)
    return 0 if all(row["ok"] for row in rows) else 1


def _show(report: dict[str, Any]) -> None:
    for name, fact in report.get("environment", {}).items():
        say(f"{name:>17}  {fact}")
    where = f"on {report['device']}"
    if "ops" in report:
        print_table(f"Ops {where}, each against its float64 definition", report["ops"])
    if "layers" in report:
        print_table(f"Layers {where}: difference to the whole sequence", report["layers"])
