"""`dlrnn bench step`: does a step cost the same wherever in the sequence it is?"""

import statistics
import time
from typing import Any

import torch

from dlrnn.bench.measure import relative_error, require_right, synchronize
from dlrnn.nn import DLR

TOLERANCE = 1e-4


def bench_step(
    *, batch: int, d_model: int, d_state: int, steps: int, device: str
) -> dict[str, Any]:
    """Median microseconds of the first and the last tenth of the steps, and their ratio.

    The two tenths are timed in turn, step against step, so that a noisy moment hits both.
    """
    where = torch.device(device)
    torch.manual_seed(0)
    layer = DLR(d_model, d_state).to(where).eval()
    x = torch.randn(steps, batch, d_model, device=where)
    tenth = max(1, steps // 10)
    seconds: dict[str, list[float]] = {"first": [], "last": []}
    outputs = []
    with torch.no_grad():
        states = {"first": layer.initial_state(batch), "last": layer.initial_state(batch)}
        for x_t in x[: steps - tenth]:
            _, states["last"] = layer.step(x_t, states["last"])
        for i in range(tenth):
            for name, position in (("first", i), ("last", steps - tenth + i)):
                synchronize(where)
                start = time.perf_counter()
                y, states[name] = layer.step(x[position], states[name])
                synchronize(where)
                seconds[name].append(time.perf_counter() - start)
                outputs.append(y)
        whole = layer(x[:tenth].transpose(0, 1)).double()
        error = relative_error(torch.stack(outputs[::2], dim=1), whole)
    require_right({"steps against the whole": error}, TOLERANCE)
    first, last = (1e6 * statistics.median(seconds[name]) for name in ("first", "last"))
    return {
        "case": {"B": batch, "H": d_model, "N": d_state, "steps": steps},
        "device": torch.cuda.get_device_name(where) if where.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "first_us": round(first, 1),
        "last_us": round(last, 1),
        "last_over_first": round(last / first, 3),
    }
