"""Training at growing lengths: the stages of a run."""

import math
from collections.abc import Sequence
from typing import NamedTuple


class Stage(NamedTuple):
    """Steps start .. stop - 1, at one length (None: the task's), with this factor of the rate."""

    length: int | None
    start: int
    stop: int
    factor: float


def make_stages(
    steps: int,
    lr: float,
    lengths: Sequence[int],
    stage_steps: Sequence[int] | None,
    stage_lr: Sequence[float] | None,
) -> list[Stage]:
    """The stages of a run at these lengths, in order.

    The last stage takes the steps that `stage_steps` leaves; without these, all take equal parts.
    """
    count = len(lengths)
    each = [steps // count] * (count - 1) if stage_steps is None else stage_steps
    starts = [sum(each[:k]) for k in range(count)]
    rates = [lr] * count if stage_lr is None else stage_lr
    stops = [*starts[1:], steps]
    factors = [rate / lr for rate in rates]
    return [Stage(*values) for values in zip(lengths, starts, stops, factors, strict=True)]


def check_stages(
    steps: int,
    lengths: Sequence[int] | None,
    stage_steps: Sequence[int] | None,
    stage_lr: Sequence[float] | None,
) -> None:
    """Raise ValueError unless these settings of a run make stages."""
    if lengths is None:
        for name, value in (("stage_steps", stage_steps), ("stage_lr", stage_lr)):
            if value is not None:
                raise ValueError(f"{name} is for training at growing lengths: set lengths too")
        return
    if not lengths or min(lengths) < 1 or sorted(set(lengths)) != list(lengths):
        raise ValueError(f"lengths must be whole numbers of at least 1 that grow, not {lengths}")
    count = len(lengths)
    if stage_steps is not None:
        if len(stage_steps) != count - 1 or min(stage_steps, default=1) < 1:
            wanted = f"{count - 1} numbers of at least 1, for all lengths but the last"
            raise ValueError(f"stage_steps must be {wanted}, not {stage_steps}")
        if sum(stage_steps) >= steps:
            raise ValueError(
                f"stage_steps must leave some of the {steps} steps for the last length; they are"
                f" {sum(stage_steps)} together"
            )
    elif steps < count:
        raise ValueError(f"steps must be at least {count}, one for each length, not {steps}")
    if stage_lr is not None and not (
        len(stage_lr) == count and all(0 < rate < math.inf for rate in stage_lr)
    ):
        wanted = f"{count} finite numbers above 0, one for each length"
        raise ValueError(f"stage_lr must be {wanted}, not {stage_lr}")


def scaled_length(length: int, inputs: Sequence[int]) -> int:
    """A mixer's option `length` at the stage of input length inputs[1]; inputs[2] is the last's.

    It is proportional to the input. A length that the shortest input, inputs[0], reaches already
    is not tied to the input, and stays.
    """
    shortest, here, last = inputs
    return length if length <= shortest else -(-length * here // last)
