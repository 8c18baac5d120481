"""What the host makes, made by threads before it is asked for."""

import os
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

Made = TypeVar("Made")


def made_ahead(
    make: Callable[[int], Made], numbers: Sequence[int], threads: int
) -> Generator[Made, None, None]:
    """`make` of each number, in their order, a few ahead: to draw 16 images may take longer than a
    GPU's step with them.
    """
    pool = ThreadPoolExecutor(threads)
    ahead = deque[Future[Made]]()
    try:
        for place in range(len(numbers)):
            for later in numbers[place + len(ahead) : place + threads + 2]:
                ahead.append(pool.submit(make, later))
            yield ahead.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)  # nobody asks for the rest


def threads_for(device: torch.device, processes: int) -> int:
    """Of the share of the cores that one of so many processes has, half, which a model on the CPU
    leaves; with a GPU all but two, 16 at most.
    """
    known = getattr(os, "sched_getaffinity", None)
    cores = (len(known(0)) if known else os.cpu_count() or 1) // processes
    free = cores // 2 if device.type == "cpu" else cores - 2
    return max(1, min(16, free))
