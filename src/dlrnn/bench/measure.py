"""Time, memory and error of a layer, measured the same way everywhere."""

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from dlrnn import ops

Item = TypeVar("Item")
Result = TypeVar("Result")

QUICK, MANY = 1e-3, 10  # s, calls

# ---------------------------------------------------------------------------------- time


def timed(function: Callable[[], Result], device: torch.device) -> tuple[float, Result]:
    """The seconds of a call until the device has finished, and its result."""
    synchronize(device)
    start = time.perf_counter()
    result = function()
    synchronize(device)
    return time.perf_counter() - start, result


def seconds(
    functions: Mapping[str, Callable[[], object]],
    device: torch.device,
    repeats: int,
    calls: int = 1,
) -> dict[str, list[float]]:
    """The seconds of a call, the mean of `calls` without a wait between them, `repeats` times.

    The functions run in turn, so that a noisy moment of the machine hits all of them. The first
    turn is a warm-up.
    """
    times: dict[str, list[float]] = {name: [] for name in functions}
    for repeat in range(repeats + 1):
        for name, function in functions.items():
            spent, _ = timed(partial(_repeat, function, calls), device)
            if repeat:
                times[name].append(spent / calls)
    return times


def _repeat(function: Callable[[], object], calls: int) -> None:
    for _ in range(calls):
        function()


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
        _repeat(function, 3)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _repeat(function, calls)
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


def device_ms(
    functions: Mapping[str, Callable[[], object]], device: torch.device, repeats: int
) -> dict[str, float]:
    """The median ms of a call: in a CUDA graph on a GPU, otherwise as it is."""
    if device.type != "cuda":
        return {name: median_ms(t) for name, t in seconds(functions, device, repeats).items()}
    return {name: median_ms(replayed(each, repeats)) for name, each in functions.items()}


def median_ms(times: list[float]) -> float:
    """The median, in milliseconds."""
    return 1e3 * statistics.median(times)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ---------------------------------------------------------------------------------- layers


@dataclass(frozen=True)
class LayerCall:
    """A layer, and how it is called: with a backend, or under autocast to bf16."""

    layer: nn.Module
    backend: str | None = None
    bf16: bool = False

    def __call__(self, x: Tensor, dy: Tensor) -> list[Tensor]:
        """Forward and backward: the output and every gradient, the input's first."""
        leaves = x.detach().requires_grad_(), *self.parameters
        with ops.use_backend(self.backend) if self.backend else nullcontext():
            with torch.autocast(x.device.type, torch.bfloat16) if self.bf16 else nullcontext():
                y = self.layer(leaves[0])
            y.backward(dy.to(y.dtype))
        results = [y.detach()]
        for leaf in leaves:
            assert leaf.grad is not None
            results.append(leaf.grad)
            leaf.grad = None  # the next call starts without gradients
        return results

    @cached_property
    def parameters(self) -> tuple[Tensor, ...]:
        """The parameters, which take time to find."""
        return tuple(self.layer.parameters())

    @property
    def plain(self) -> nn.Module:
        """The layer; the one inside, if it was made by `torch.compile`."""
        layer: nn.Module = getattr(self.layer, "_orig_mod", self.layer)
        return layer

    def errors(self, x: Tensor, dy: Tensor, exact: nn.Module | None = None) -> dict[str, float]:
        """The relative errors of output and gradients against float64: this layer, or `exact`."""
        exact = deepcopy(self.plain).double() if exact is None else exact
        truth = LayerCall(exact, "torch")(x.double(), dy.double())
        names = "y", "x", *(name for name, _ in exact.named_parameters())
        pairs = zip(names, self(x, dy), truth, strict=True)
        return {name: relative_error(have, want) for name, have, want in pairs}


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


# ---------------------------------------------------------------------------------- memory


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
        profile(
            activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
        ) as profiler,
    ):
        function()
    events = profiler.profiler.kineto_results.events()
    memory = [event for event in events if event.name() == "[memory]"]
    memory.sort(key=lambda event: event.start_ns())
    sizes: list[int] = [event.nbytes() for event in memory]
    return max(accumulate(sizes, initial=0))


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


# ---------------------------------------------------------------------------------- results


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
