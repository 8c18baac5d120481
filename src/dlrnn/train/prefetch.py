"""Make batches in threads before the training loop asks for them."""

import os
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

Item = TypeVar("Item")


def prefetch(
    make: Callable[[int], Item], numbers: Sequence[int], threads: int
) -> Generator[Item, None, None]:
    """`make(number)` for each number, in order, computed by threads a few numbers in advance.

    Drawing 16 images on the host may take longer than a GPU's training step with them.
    """
    pool = ThreadPoolExecutor(threads)
    pending = deque[Future[Item]]()
    try:
        for place in range(len(numbers)):
            for later in numbers[place + len(pending) : place + threads + 2]:
                pending.append(pool.submit(make, later))
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def thread_count(device: torch.device, processes: int) -> int:
    """Threads for `prefetch` in one of `processes` processes on this machine.

    Half of the process's cores when the model runs on the CPU; all but two with a GPU; at most 16.
    """
    known = getattr(os, "sched_getaffinity", None)
    cores = (len(known(0)) if known else os.cpu_count() or 1) // processes
    free = cores // 2 if device.type == "cpu" else cores - 2
    return max(1, min(16, free))
