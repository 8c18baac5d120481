"""The choice of a plan (tile, warps, stages) for a kernel: from a table, or measured once.

A kernel whose best plan depends on the GPU names a few candidates, the default first. For a GPU in
the package's table (tuned.json), the table decides; a kernel that it does not name runs its
default. On any other GPU the candidates are timed at first use, on the given tensors, and the
fastest is written to a file in the folder of the compiled kernels. If several processes measure,
the first to finish decides for all. DLRNN_TUNE=0 switches the measurement off.

Nothing is measured while a CUDA graph is captured, or where the choice could not be written: the
next process might choose another plan, which rounds differently.
"""

import hashlib
import json
import logging
import math
import os
import tempfile
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from dlrnn.ops.cuda.nvrtc import cache_folder

SHIPPED = Path(__file__).with_name("tuned.json")
ROUNDS = 10  # of timing, for each candidate
GAIN = 0.05  # by which a plan must be faster than the default, because times are noisy
POSITIONS = 2**12, 2**14, 2**16, 2**18  # below and above, plans compare as they do there

Plan = TypeVar("Plan", bound=tuple[int, ...])
_chosen: dict[tuple[object, ...], Any] = {}
_deciders: list[Callable[..., Any]] = []


def size_class(positions: int) -> int:
    """The next of 2^12, 2^14, 2^16, 2^18, or the last: tensors of one class share their plans."""
    return POSITIONS[bisect_left(POSITIONS[:-1], positions)]


def choose(
    kernel: str,
    sizes: tuple[int, ...],
    candidates: Sequence[Plan],
    run: Callable[[Plan], object],
    x: Tensor,
) -> Plan:
    """The plan for this kernel, these sizes and the GPU of x; later calls return the same plan.

    `run` computes with a plan, into fresh tensors; results differ between plans by rounding only.
    """
    key = kernel, x.device, *sizes
    plan: Plan | None = _chosen.get(key)
    if plan is None:
        if len(candidates) == 1 or (not _deciders and not _is_on_gpu(x)):
            return candidates[0]
        name = f"{kernel} {text_of(sizes)}"
        decide = _deciders[-1] if _deciders else _decide
        plan = _chosen[key] = decide(name, candidates, run, x)
    return plan


@contextmanager
def decided_by(decide: Callable[..., Any]) -> Iterator[None]:
    """Inside, `decide(name, candidates, run, x)` chooses: for tests, and for `bench tuning`."""
    before = dict(_chosen)
    _chosen.clear()
    _deciders.append(decide)
    try:
        yield
    finally:
        _deciders.pop()
        _chosen.clear()
        _chosen.update(before)


def fastest(times: dict[Plan, float]) -> Plan:
    """The default, which is the first, unless another plan is faster by `GAIN`."""
    default, best = next(iter(times)), min(times, key=times.__getitem__)
    return best if times[best] < (1 - GAIN) * times[default] else default


def _is_on_gpu(x: Tensor) -> bool:
    """Whether x lies on a GPU and has values: it is not traced."""
    return x.is_cuda and not isinstance(x, FakeTensor) and not torch.compiler.is_compiling()


def _decide(
    name: str, candidates: Sequence[Plan], run: Callable[[Plan], object], x: Tensor
) -> Plan:
    gpu = torch.cuda.get_device_name(x.device)
    if gpu in shipped():
        return _among(candidates, shipped()[gpu].get(name))
    folder = cache_folder() / "tuned"
    about = {"gpu": gpu, "kernel": name, "candidates": [text_of(plan) for plan in candidates]}
    key = hashlib.sha256(json.dumps(about).encode()).hexdigest()
    path = folder / f"{name.replace(' ', '-')}-{key[:16]}.json"
    kept = _kept(path, about)
    if kept is None and _may_measure() and _is_writable(folder):
        text = "tuning kernels for %s, for the first time here: about 10 s; choices are kept in %s"
        _say_once(text, gpu, folder)
        times = times_of(candidates, run, x)
        if math.isinf(times[candidates[0]]):  # not even the default: there is no memory left
            return candidates[0]
        best = fastest(times)
        kept = _keep(path, about, text_of(best))
    return _among(candidates, kept)


def _may_measure() -> bool:
    if (asked := os.environ.get("DLRNN_TUNE") or "1") not in ("0", "1"):
        raise ValueError(f"DLRNN_TUNE is 0 (nothing is measured) or 1 (the default), not {asked!r}")
    return asked == "1" and not torch.cuda.is_current_stream_capturing()


def times_of(
    candidates: Sequence[Plan], run: Callable[[Plan], object], x: Tensor
) -> dict[Plan, float]:
    """Microseconds, the shortest of a few runs in turns; infinite if a plan cannot run here."""
    times, able = dict.fromkeys(candidates, math.inf), []
    with torch.cuda.device(x.device), suppress(torch.OutOfMemoryError):
        for plan in candidates:
            with suppress(Exception):  # a plan may want more than a smaller GPU has
                run(plan)  # which compiles it
                able.append(plan)
        other = torch.empty(2**25, device=x.device)  # 128 MiB
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for plan in able * ROUNDS:
            other.zero_()  # evicts our tensors from the L2 cache
            torch.cuda._sleep(1_000_000)  # half a millisecond, in which launching gets ahead
            start.record()
            run(plan)
            stop.record()
            stop.synchronize()
            times[plan] = min(times[plan], 1e3 * start.elapsed_time(stop))
    return times


# ---------------------------------------------------------------------------------- tables


@cache
def shipped() -> dict[str, dict[str, str]]:
    """For each GPU, by kernel and sizes, the plans that are not the default."""
    table: dict[str, dict[str, str]] = json.loads(SHIPPED.read_text())
    return table


def text_of(numbers: tuple[int, ...]) -> str:
    """Sizes or a plan in a table."""
    return " ".join(str(int(number)) for number in numbers)


def _among(candidates: Sequence[Plan], plan: str | None) -> Plan:
    return next((known for known in candidates if text_of(known) == plan), candidates[0])


def _kept(path: Path, about: dict[str, Any]) -> str | None:
    """The plan in a file, or None if it holds none for this GPU."""
    try:
        kept = json.loads(path.read_text())
        if kept not in [about | {"plan": plan} for plan in about["candidates"]]:
            raise ValueError("it is about something else")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        _say_once("%s is left aside, it holds no plan for this GPU: %s", path, error)
        return None
    plan: str = kept["plan"]
    return plan


def _is_writable(folder: Path) -> bool:
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    if not (is_writable := os.access(folder, os.W_OK)):
        _say_once("kernels run with default plans: choices could not be kept in %s", folder)
    return is_writable


def _keep(path: Path, about: dict[str, Any], plan: str) -> str | None:
    """Writes the plan atomically and returns the plan in the file: that of the first process."""
    with suppress(OSError):
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as beside:
            json.dump(about | {"plan": plan}, beside)
        try:
            os.link(beside.name, path)
        except OSError:  # there is one, or this disk has no links
            if _kept(path, about) is None:
                os.replace(beside.name, path)
        Path(beside.name).unlink(missing_ok=True)
    return _kept(path, about)


@cache
def _say_once(text: str, *values: object) -> None:
    logging.getLogger("dlrnn").warning(text, *values)
