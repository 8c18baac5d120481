"""Every mixer in every form, for the tests of what all of them must do."""

from dlrnn.nn import (
    DLR,
    DSS,
    S4,
    S4D,
    Attention,
    AttentionFF,
    Experts,
    LocalAttention,
    SGConv,
)

SMALL = {
    "dlr": lambda **options: DLR(4, 6, **options),
    "dss": lambda **options: DSS(4, 6, **options),
    "s4d": lambda **options: S4D(4, 6, **options),
    "s4": lambda **options: S4(4, 6, **options),
    "sgconv": lambda **options: SGConv(4, length=16, d_kernel=4, **options),
    "attention": lambda **options: Attention(4, heads=2, **options),
    "attention-ff": lambda **options: AttentionFF(4, heads=2, d_ff=8, **options),
    "local-attention": lambda **options: LocalAttention(4, heads=2, chunk=4, **options),
    "experts": lambda **options: Experts(4, 3, 5, **options),
}
"""A small layer of each kind, with four channels."""
