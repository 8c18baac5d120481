"""How many modules of dlrnn `dlrnn train` enters between the command and the last record.

`python tests/train/test_modules_entered.py` prints them with the functions that are entered.
"""

import json
import sys

from support import run_python

MOST = 32

SCRIPT = """
import json, os, sys, tempfile, threading
import dlrnn.cli.training, dlrnn.paper.recipes, dlrnn.train  # what an import calls is not counted

SOURCE = os.path.dirname(dlrnn.__file__) + os.sep
FUNCTION = 1  # CO_OPTIMIZED: not the body of a module or of a class
entered = {}

def note(frame, event, _):
    code = frame.f_code
    if event == "call" and code.co_filename.startswith(SOURCE) and code.co_flags & FUNCTION:
        module = code.co_filename.removeprefix(SOURCE)
        entered.setdefault(module, {})[code.co_qualname] = None

with tempfile.TemporaryDirectory() as folder:
    threading.setprofile(note)
    sys.setprofile(note)
    small = "--scale tiny --steps 4 --device cpu --json --out".split()
    status = dlrnn.cli.main(["train", "table1/shift/dlr-1", *small, folder + "/run"])
    sys.setprofile(None)
assert status == 0
print(json.dumps({name: list(entered[name]) for name in sorted(entered)}))
"""


def modules_entered() -> dict[str, list[str]]:
    """Functions that a training command enters, by module."""
    found: dict[str, list[str]] = json.loads(run_python(SCRIPT).splitlines()[-1])
    return found


def test_a_training_command_enters_few_modules():
    entered = modules_entered()
    assert "train/trainer.py" in entered
    assert len(entered) <= MOST, entered


if __name__ == "__main__":
    found = modules_entered()
    for name, functions in found.items():
        sys.stdout.write(f"{name:32} {', '.join(functions)[:100]}\n")
    sys.stdout.write(f"{len(found)} modules\n")
