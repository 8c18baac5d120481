"""Powers of matrices, `step^n` for any n; only the argument is kept for backward.

The derivative along `change` is `sum_j step^j change step^(n-1-j)`, formed by the binary digits of
n like the power itself. It is also a block of `[[step, change], [0, step]]^n`, and so has a
derivative of the same form: any order of differentiation needs these two ops only.

A few rows times a power need no power: `times_power` needs a third of the products, but keeps the
squares for backward. It runs on GPUs, which have the memory.
"""

from typing import Any

import torch
from torch import Tensor

from dlrnn.ops.dispatch import op


@op("dlrnn::matrix_power")
def matrix_power(step: Tensor, n: int) -> Tensor:
    """`step^n`, n >= 1; step [H, N, N]."""
    power: Tensor = torch.linalg.matrix_power(step, n)
    return power


@op("dlrnn::matrix_power_slope")
def _slope(step: Tensor, change: Tensor, n: int) -> Tensor:
    """`sum_j step^j change step^(n-1-j)`: how the n-th power changes."""
    slope = torch.zeros_like(step)
    power = torch.diag_embed(step.new_ones(step.shape[:-1]))
    while n:
        if n % 2:
            power, slope = power @ step, power @ change + slope @ step
        step, change = step @ step, step @ change + change @ step
        n //= 2
    return slope


@matrix_power.register_fake
def _(step: Tensor, n: int | torch.SymInt) -> Tensor:
    return step.new_empty(step.shape)


@_slope.register_fake
def _(step: Tensor, change: Tensor, n: int | torch.SymInt) -> Tensor:
    return step.new_empty(step.shape)


def _setup_power(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.n = inputs
    ctx.save_for_backward(*tensors)


def _power_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    (step,) = ctx.saved_tensors
    return _slope(step.mT, grad, ctx.n), None


def _slope_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    """The slope is a block of `[[step, change], [0, step]]^n`, whose slope is known."""
    step, change = ctx.saved_tensors
    zero = torch.zeros_like(step)
    both = torch.cat((torch.cat((step, change), -1), torch.cat((zero, step), -1)), -2)
    above = torch.cat((torch.cat((zero, grad), -1), torch.cat((zero, zero), -1)), -2)
    upper, lower = _slope(both.mT, above, ctx.n).chunk(2, dim=-2)
    n = step.shape[-1]
    return upper[..., :n] + lower[..., n:], upper[..., n:], None


matrix_power.register_autograd(_power_backward, setup_context=_setup_power)
_slope.register_autograd(_slope_backward, setup_context=_setup_power)


def times_power(rows: Tensor, step: Tensor, n: int) -> Tensor:
    """`rows @ step^n`, n >= 1, [H, R, N] and [H, N, N]; backward keeps the squares."""
    while True:
        if n % 2:
            rows = rows @ step
        n //= 2
        if not n:
            return rows
        step = step @ step
