"""`dlrnn generate` and `dlrnn export`."""

import argparse
from pathlib import Path
from typing import Any

from dlrnn.cli.shared import count, device_option, resolve, say, trust_option
from dlrnn.common.untrusted import printable


def add(commands: Any) -> None:
    """Their parsers."""
    writes = commands.add_parser(
        "generate", help="a language model of a run writes", allow_abbrev=False
    )
    writes.set_defaults(run=_generate, parser=writes)
    writes.add_argument("run_folder", type=Path, metavar="RUN")
    writes.add_argument("--prompt", required=True, metavar="TEXT")
    writes.add_argument("--tokens", type=count, default=200, help="at most; default: 200")
    text = "0 always takes the most likely token; default: 1"
    writes.add_argument("--temperature", type=float, default=1.0, help=text)
    writes.add_argument("--top-k", type=count, metavar="K", help="among the K most likely")
    text = "among the fewest that have the probability P together"
    writes.add_argument("--top-p", type=float, metavar="P", help=text)
    writes.add_argument("--seed", type=int, default=0)
    device_option(writes)

    text = "the best model of a run as a folder for from_pretrained, or on the Hub"
    exported = commands.add_parser("export", help=text, description=text, allow_abbrev=False)
    exported.set_defaults(run=_export, parser=exported)
    exported.add_argument("run_folder", type=Path, metavar="RUN")
    exported.add_argument("out", type=Path, metavar="DIR")
    trust_option(exported)
    exported.add_argument("--push", metavar="OWNER/NAME", help="upload it to the Hub, too")


def _generate(given: argparse.Namespace) -> int:
    from dlrnn.train.generation import write

    options = ("tokens", "temperature", "top_k", "top_p", "seed")
    settings = {name: getattr(given, name) for name in options}
    pieces = write(given.run_folder, given.prompt, **settings, device=resolve(given.device))
    print(given.prompt, end="", flush=True)
    for piece in pieces:  # a tokenizer comes with the run, and may hold any character
        print(printable(piece, allowed="\n\t"), end="", flush=True)
    print()
    return 0


def _export(given: argparse.Namespace) -> int:
    from dlrnn.train.export import export_run

    replaces = (given.out / "config.json").exists()
    where = export_run(given.run_folder, given.out, push=given.push, trust=given.trust)
    say(f"the model is in {where}{'; it replaces one that was there' if replaces else ''}")
    return 0
