"""Sums of products of fp32 numbers, rounded once, without float64 and without fused multiply-add.

The rounding error of a sum or of a product is itself an fp32 number, which these functions compute
exactly (error-free transformations, by Knuth and Dekker).
"""

from torch import Tensor

SPLITTER = 2.0**12 + 1


def sum_of_products(pairs: list[tuple[Tensor, Tensor]], added: Tensor, small: Tensor) -> Tensor:
    """`added + small + sum a b` over the pairs (a, b) in fp32, almost as if rounded once.

    `small` is much smaller than the result.
    """
    total, error = added, small
    for a, b in pairs:
        product, lost = _exact_product(a, b)
        total, more = _exact_sum(total, product)
        error = error + (lost + more)
    return total + error


def _exact_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The rounded sum, and what rounding lost."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def _exact_product(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The rounded product, and what rounding lost."""
    (a_high, a_low), (b_high, b_low) = _halves(a), _halves(b)
    product = a * b
    lost = ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low
    return product, lost


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Two numbers of 12 bits whose sum is x."""
    far = SPLITTER * x
    high = far - (far - x)
    return high, x - high
