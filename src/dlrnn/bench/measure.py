"""Time and memory of a function, measured the same way everywhere."""

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Item = TypeVar("Item")


def seconds(
    functions: Mapping[str, Callable[[], object]], device: torch.device, repeats: int
) -> dict[str, list[float]]:
    """The seconds of each call, after one call to warm up.

    The functions run in turn, so that a noisy moment of the machine hits all of them.
    """
    times: dict[str, list[float]] = {name: [] for name in functions}
    for repeat in range(repeats + 1):
        for name, function in functions.items():
            synchronize(device)
            start = time.perf_counter()
            function()
            synchronize(device)
            if repeat:
                times[name].append(time.perf_counter() - start)
    return times


def machine(device: torch.device) -> dict[str, Any]:
    """The part of every result that says where it was measured."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def announced(items: Sequence[Item], name: Callable[[Item], str]) -> Iterator[Item]:
    """Yield the items, and name each on stderr before it is measured, which may take minutes."""
    for number, item in enumerate(items, start=1):
        print(f"measuring {name(item)} ({number} of {len(items)})", file=sys.stderr)
        yield item


QUICK, MANY = 1e-3, 10  # s, calls


def replayed(function: Callable[[], object], repeats: int) -> list[float]:
    """The seconds of a call on a GPU without the time of launches.

    The call is captured in a CUDA graph (ten calls if they are quick), which is replayed behind
    another replay, so that the GPU never waits for the host.
    """
    graph, calls = _captured(function, 1), 1
    if _on_device(graph) < QUICK:
        graph, calls = _captured(function, MANY), MANY
    return [_on_device(graph) / calls for _ in range(repeats)]


def _captured(function: Callable[[], object], calls: int) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            function()
    return graph


def _on_device(graph: torch.cuda.CUDAGraph) -> float:
    """Seconds of the second of two replays."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def relative_error(value: Tensor, truth: Tensor) -> float:
    """`||value - truth|| / ||truth||`, the absolute error where the truth is 0; NaN stays NaN."""
    size = float(truth.norm())
    return float((value.double() - truth).norm()) / (size or 1.0)


def require_right(errors: dict[str, float], tolerance: float) -> None:
    """Raise unless every error is within the tolerance (NaN is not): no time of a wrong answer."""
    wrong = {name: error for name, error in errors.items() if not error <= tolerance}
    if wrong:
        shown = ", ".join(f"{name} {error:.1e}" for name, error in wrong.items())
        raise RuntimeError(f"no time for a wrong answer: errors above {tolerance:.0e}: {shown}")


def forward_backward(
    layer: nn.Module,
    x: Tensor,
    dy: Tensor,
    precision: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> list[Tensor]:
    """The output and every gradient, the input's first, inside a context such as autocast."""
    inputs = (x.detach().requires_grad_(), *layer.parameters())
    with precision():
        y = layer(inputs[0])
    return [y.detach(), *torch.autograd.grad(y, inputs, dy.to(y.dtype))]


def median_ms(times: list[float]) -> float:
    """The median, in milliseconds."""
    return 1e3 * statistics.median(times)


def peak_bytes(function: Callable[[], object], device: torch.device) -> int:
    """The largest amount of tensor memory that is allocated at once while `function` runs."""
    function()  # one-time buffers of libraries are not counted
    synchronize(device)
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        function()
        return torch.cuda.max_memory_allocated(device) - before
    with (
        _quiet_stderr(),
        torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
        ) as profiler,
    ):
        function()
    events = profiler.profiler.kineto_results.events()
    memory = [event for event in events if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(memory, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def _quiet_stderr() -> Iterator[None]:
    """Discard what the profiler's native code writes to stderr."""
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
