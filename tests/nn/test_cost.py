"""How much of our code one call of the layer enters: what a newcomer reads, and what Python costs.

`sys.setprofile` counts every call of a function of ours, generator expressions included.
"""

import json

from support import run_python

MOST_CALLS = 40
MOST_FILES = 6

CODE = """
import json, sys
from collections import Counter
from pathlib import Path
import torch
import dlrnn
from dlrnn.nn import DLR

root, calls = str(Path(dlrnn.__file__).parent), Counter()

def record(frame, event, argument):
    code = frame.f_code
    if event == "call" and code.co_filename.startswith(root):
        calls[code.co_filename[len(root) + 1:] + ": " + code.co_qualname] += 1

x = torch.randn(2, 64, 16)
DLR(16, 16)(x)  # imports and caches
sys.setprofile(record)
DLR(16, 16)(x)
sys.setprofile(None)
print(json.dumps(calls.most_common()))
"""


def test_a_layer_and_its_forward_enter_few_functions_and_files():
    """On a CPU: `DLR(16, 16)(x)`. Lower the bounds when the numbers fall."""
    calls = json.loads(run_python(CODE))
    total = sum(count for _, count in calls)
    files = {name.partition(":")[0] for name, _ in calls}
    table = "\n".join(f"{count:4} {name}" for name, count in calls)
    assert 0 < total <= MOST_CALLS, f"{total} calls:\n{table}"
    assert 0 < len(files) <= MOST_FILES, f"{len(files)} files: {sorted(files)}"
