"""`dlrnn generate` and `dlrnn export`."""

import argparse
from pathlib import Path
from typing import Any

from dlrnn.cli.shared import count, device_option, resolve, say, trust_option
from dlrnn.common.untrusted import printable


def add(commands: Any) -> None:
    """Add the parsers of both commands."""
    text = "generate text from the best model of a run"
    writes = commands.add_parser("generate", help=text, description=text, allow_abbrev=False)
    writes.set_defaults(run=_generate, parser=writes)
    writes.add_argument("run_folder", type=Path, metavar="RUN")
    writes.add_argument("--prompt", required=True, metavar="TEXT")
    writes.add_argument("--tokens", type=count, default=200, help="at most this many; default: 200")
    text = "0 always takes the most likely token; default: 1"
    writes.add_argument("--temperature", type=float, default=1.0, help=text)
    writes.add_argument(
        "--top-k", type=count, metavar="K", help="draw from the K most likely tokens"
    )
    text = "draw from the fewest tokens that together have probability P"
    writes.add_argument("--top-p", type=float, metavar="P", help=text)
    writes.add_argument("--seed", type=int, default=0)
    device_option(writes)

    text = "write the best model of a run as a folder for from_pretrained, or upload it"
    exported = commands.add_parser("export", help=text, description=text, allow_abbrev=False)
    exported.set_defaults(run=_export, parser=exported)
    exported.add_argument("run_folder", type=Path, metavar="RUN")
    exported.add_argument("out", type=Path, metavar="DIR")
    trust_option(exported)
    exported.add_argument("--push", metavar="OWNER/NAME", help="upload it to the Hub, too")


def _generate(given: argparse.Namespace) -> int:
    from dlrnn.train.generation import generate_text

    options = ("tokens", "temperature", "top_k", "top_p", "seed")
    settings = {name: getattr(given, name) for name in options}
    pieces = generate_text(given.run_folder, given.prompt, **settings, device=resolve(given.device))
    print(given.prompt, end="", flush=True)
    for piece in pieces:  # tokens of an untrusted run may hold control characters
        print(printable(piece, allowed="\n\t"), end="", flush=True)
    print()
    return 0


def _export(given: argparse.Namespace) -> int:
    from dlrnn.train.export import export_run

    replaced = (given.out / "config.json").exists()
    where = export_run(given.run_folder, given.out, push=given.push, trust=given.trust)
    say(f"the model is in {where}{'; it replaced an older one' if replaced else ''}")
    return 0
