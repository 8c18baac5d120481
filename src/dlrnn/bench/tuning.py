"""`dlrnn bench tuning`: the time of every plan of each tunable kernel, and the best plans."""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dlrnn.bench.measure import relative_error, require_right
from dlrnn.common.files import write_whole
from dlrnn.ops import tuning
from dlrnn.ops.cuda import output_stage as mixing

TOLERANCE = 1e-5  # between two plans
WIDTHS = 16, 32, 64, 128, 256
COUNTS = 1, 4, 16  # of a thin map
BATCH = 16
MOST_PLANS = 4

Call = partial[Any]


def bench_tuning(*, device: str) -> dict[str, Any]:
    """The time of each plan, and a table of the fastest; all plans must give the same results."""
    where = torch.device(device)
    if where.type != "cuda":
        raise ValueError("only kernels on a GPU have plans to choose from; the device is cpu")
    times: dict[str, dict[Any, float]] = {}

    def measure(
        name: str, candidates: Sequence[Any], run: Callable[[Any], object], x: Tensor
    ) -> Any:
        times[name] = tuning.times_of(candidates, run, x)
        return tuning.fastest(times[name])

    for width in WIDTHS:
        for positions in tuning.POSITIONS:
            for call in kernel_calls(width, positions, where):
                require_one_answer(call)
                with tuning.decided_by(measure):
                    call()
    best = {name: tuning.fastest(found) for name, found in times.items()}
    rows = [
        {
            "kernel, sizes": name,
            "plans": ", ".join(tuning.text_of(plan) for plan in found),
            "us": ", ".join(f"{us:.1f}" for us in found.values()),
            "fastest": tuning.text_of(best[name]),
        }
        for name, found in times.items()
    ]
    chosen = {
        name: tuning.text_of(plan)
        for name, plan in sorted(best.items())
        if plan != next(iter(times[name]))
    }
    gpu = torch.cuda.get_device_name(where)
    return {"device": gpu, "case": {"B": BATCH}, "kernels": rows, "table": {gpu: chosen}}


def write_table(file: str, table: dict[str, dict[str, str]]) -> None:
    """Add the table to a file like ops/tuned.json; entries of other GPUs stay."""
    path = Path(file)
    before = json.loads(path.read_text()) if path.exists() else {}
    write_whole(path, (json.dumps(before | table, indent=1) + "\n").encode())


def require_one_answer(call: Call) -> None:
    """Raise unless every plan of a kernel gives the same result."""

    def results(which: int) -> tuple[Tensor, ...]:
        with tuning.decided_by(lambda _, candidates, *__: candidates[which % len(candidates)]):
            result = call()
        return result if isinstance(result, tuple) else (result,)

    name, first = call.func.__qualname__, [result.double() for result in results(0)]
    for which in range(1, MOST_PLANS):
        pairs = zip(results(which), first, strict=True)
        errors = {f"{name} {i}": relative_error(*pair) for i, pair in enumerate(pairs)}
        require_right(errors, TOLERANCE)


def kernel_calls(width: int, positions: int, device: torch.device) -> Iterator[Call]:
    """Calls of every tunable kernel at these sizes."""
    from dlrnn.ops.triton import layer_norm, thin_linear

    length, generator = positions // BATCH, torch.Generator(device).manual_seed(0)
    x, other = torch.randn(2, BATCH, length, width, generator=generator, device=device)
    weight, bias = x[0, :width] / width**0.5, x[1, 0]
    yield partial(layer_norm.forward, x, None, bias, bias, 1e-5)
    yield partial(layer_norm.forward, x, other, bias, bias, 1e-5)
    yield partial(layer_norm.backward, other, x, bias, 1e-5)
    flat = x.flatten(0, 1)
    for count in COUNTS if width in thin_linear.CHANNELS else ():
        thin = other.flatten(0, 1)[:, :count].contiguous()
        yield partial(thin_linear.spread, thin, weight[:count], bias)
        yield partial(thin_linear.gather, flat, weight[:count], bias[:count])
        yield partial(thin_linear.outer, thin, flat)
    if width <= mixing.WIDTH and mixing.supports(x):
        for y, in_rows in ((x, False), (x.transpose(1, 2).contiguous(), True)):
            yield partial(mixing.forward, y, length, weight, bias, "gelu", in_rows=in_rows)
            yield partial(mixing.backward, other, y, weight, "gelu", in_rows=in_rows)
