"""`dlrnn bench step`: does a step cost the same wherever in the sequence it is?"""

import statistics
import time
from typing import Any

import torch

from dlrnn.nn import DLR


def bench_step(
    *, batch: int, d_model: int, d_state: int, steps: int, device: str
) -> dict[str, Any]:
    """Median microseconds of the first and the last tenth of the steps, and their ratio."""
    where = torch.device(device)
    torch.manual_seed(0)
    layer = DLR(d_model, d_state).to(where).eval()
    x = torch.randn(steps, batch, d_model, device=where)
    seconds = []
    with torch.no_grad():
        for x_t in x[:100]:  # warm-up: the first calls of a process fill caches
            layer.step(x_t)
        state = layer.initial_state(batch)
        for x_t in x:
            start = time.perf_counter()
            _, state = layer.step(x_t, state)
            if where.type == "cuda":
                torch.cuda.synchronize(where)
            seconds.append(time.perf_counter() - start)
    tenth = max(1, steps // 10)
    first, last = (1e6 * statistics.median(part) for part in (seconds[:tenth], seconds[-tenth:]))
    return {
        "case": {"B": batch, "H": d_model, "N": d_state, "steps": steps},
        "device": torch.cuda.get_device_name(where) if where.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "first_us": round(first, 1),
        "last_us": round(last, 1),
        "last_over_first": round(last / first, 3),
    }
