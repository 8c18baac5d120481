"""Every mixer in every form, for the tests of what all of them must do."""

import math
from functools import partial
from typing import Any, NamedTuple

import torch
from support import DEVICE
from torch import nn

from dlrnn.nn import (
    DLR,
    DSS,
    S4,
    S4D,
    Attention,
    AttentionFF,
    Experts,
    GatedDLR,
    LocalAttention,
    Mixer,
    SGConv,
    TapeDLR,
)
from dlrnn.nn.dlr import PROD_PAIRS_UP_TO

SMALL = {
    "dlr": partial(DLR, d_model=4, d_state=6),
    "gated-dlr": partial(GatedDLR, d_model=4, d_state=6),
    "dss": partial(DSS, d_model=4, d_state=6),
    "s4d": partial(S4D, d_model=4, d_state=6),
    "s4": partial(S4, d_model=4, d_state=6),
    "sgconv": partial(SGConv, d_model=4, length=16, d_kernel=4),
    "tape": partial(TapeDLR, d_model=4, length=10, heads=2, d_head=2, kernels=2),
    "attention": partial(Attention, d_model=4, heads=2),
    "attention-ff": partial(AttentionFF, d_model=4, heads=2, d_ff=8),
    "local-attention": partial(LocalAttention, d_model=4, heads=2, chunk=4),
    "experts": partial(Experts, d_model=4, experts=3, d_ff=5),
}
"""A small layer of each kind, with four channels."""

STREAMING = SMALL | {"experts": partial(Experts, 4, experts=3, d_ff=5, router="threshold")}

KERNEL_MIXERS = DLR, DSS, S4D, S4, SGConv


class UsersMixer(Mixer[torch.Tensor]):
    """`s_t = (s_{t-1} + u_t) / 2`: a user's subclass, which gets the contract from `Mixer`."""

    def __init__(self, d_model, *, bidirectional=False):
        super().__init__()
        self.d_model, self.bidirectional = d_model, bidirectional
        self.rate = nn.Parameter(torch.full((d_model,), 0.5))

    def options(self):
        return {"d_model": self.d_model, "bidirectional": self.bidirectional}

    def _parameter(self):
        return self.rate

    def _whole(self, u, lengths):
        return self._chunk(u, None, lengths)[0]

    def _chunk(self, u, state, lengths):
        states = [self._initial_state(len(u)) if state is None else state]
        for u_t in u.unbind(1):
            states.append(self.rate * (states[-1] + u_t))
        every = torch.stack(states, dim=1)  # [B, L + 1, H]
        last = every[:, -1] if lengths is None else every[range(len(u)), lengths]
        return every[:, 1:].to(u.dtype), last.clone()

    def _step(self, u, state):
        y, state = self._chunk(u[:, None], state, None)
        return y[:, 0], state

    def _initial_state(self, batch_size):
        return self.rate.new_zeros(batch_size, self.d_model)

    def _check_state(self, state, batch):
        if state.shape != (batch, self.d_model):
            raise ValueError(f"state: expected {[batch, self.d_model]}, got {list(state.shape)}")


class Form(NamedTuple):
    """A mixer with its options."""

    kind: type[Mixer[Any]]
    options: dict[str, Any]
    length: int = 200  # of a sequence that is read whole
    prefix: int = 40  # of a chunk that is followed by others
    many: bool = False  # its state holds the whole prefix

    def __str__(self) -> str:
        options = ",".join(f"{name}={value}" for name, value in self.options.items())
        return f"{self.kind.__name__}({options})"

    def make(self, dtype=torch.float64, **more):
        """A layer whose parameters are not those of the initialisation: as after training."""
        layer = self.kind(**SIZES[self.kind] | self.options | more).to(DEVICE, dtype).eval()
        with torch.no_grad():
            if isinstance(layer, Attention):  # a softmax that is far from a mean
                layer.qkv.weight.mul_(4)
            elif isinstance(layer, S4):  # P and B with imaginary parts, decays that differ
                for parameter in (layer.P, layer.B, layer.log_decay, layer.frequency):
                    parameter.add_(torch.randn_like(parameter), alpha=0.3)
            elif isinstance(layer, SGConv):  # the norm is not that of the kernel any more
                layer.sub_kernels.normal_(std=0.3)
            elif isinstance(layer, TapeDLR):
                layer.c.normal_(std=0.3)
            elif isinstance(layer, UsersMixer):
                layer.rate.uniform_()
        return layer

    def input(self, length, batch=2, dtype=torch.float64):
        """A random x [B, L, H]."""
        channels = SIZES[self.kind]["d_model"]
        return torch.randn(batch, length, channels, dtype=dtype, device=DEVICE)


SIZES: dict[Any, dict[str, Any]] = {
    DLR: {"d_model": 5, "d_state": 9, "dt_min": 1e-6, "dt_max": 1e-2},  # |lambda| above 0.99
    GatedDLR: {"d_model": 4, "d_state": 7, "dt_min": 1e-6, "dt_max": 1e-2},
    DSS: {"d_model": 5, "d_state": 10},
    S4D: {"d_model": 5, "d_state": 10},
    S4: {"d_model": 3, "d_state": 6},
    SGConv: {"d_model": 3, "length": 130, "d_kernel": 4},
    TapeDLR: {"d_model": 4, "length": 12, "heads": 2, "d_head": 4, "kernels": 2},
    Attention: {"d_model": 8, "heads": 2},
    AttentionFF: {"d_model": 8, "heads": 2, "d_ff": 5},
    LocalAttention: {"d_model": 8, "heads": 2, "chunk": 7},
    Experts: {"d_model": 6, "experts": 4, "d_ff": 5, "router": "threshold"},
    UsersMixer: {"d_model": 3},
}
MANY_STATES = PROD_PAIRS_UP_TO + 1  # from here on DLR-prod streams by online convolution

CAUSAL = [
    Form(DLR, {}),
    Form(DLR, {"cast": "prod"}),
    Form(DLR, {"cast": "prod", "d_state": MANY_STATES}, many=True),
    Form(DLR, {"kernel_length": 70}),
    Form(DLR, {"kernel_length": 3, "activation": "relu"}),
    Form(DLR, {"kernel_length": 1, "activation": "identity"}),
    Form(DLR, {"cast": "prod", "kernel_length": 70}),
    Form(DLR, {"cast": "prod", "d_state": MANY_STATES, "kernel_length": 70}),
    Form(DLR, {"glu": True, "activation": "silu"}),
    Form(DLR, {"real": True}),
    Form(DLR, {"project": False}),
    Form(GatedDLR, {}, 100),
    Form(GatedDLR, {"cast": "prod", "d_state": MANY_STATES}, 100, many=True),
    Form(GatedDLR, {"kernel_length": 9, "glu": True}, 100),
    *(
        Form(kind, options)
        for kind in (DSS, S4D)
        for options in (
            {},
            {"kernel_length": 70},
            {"kernel_length": 3},
            {"glu": True},
            {"project": False},
        )
    ),
    Form(DSS, {"frequency_step": 2 * math.pi, "dt_min": 1e-3, "dt_max": 0.1}),
    Form(S4D, {"d_state": 2, "dt_min": 1e-5, "dt_max": 1e-4}),
    *(
        Form(S4, options, 300, 140)  # several blocks of the recurrence
        for options in (
            {},
            {"kernel_length": 9},
            {"kernel_length": 1},
            {"glu": True},
            {"project": False},
            {"d_state": 64},
        )
    ),
    *(
        Form(SGConv, options, 100, many="kernel_length" not in options)
        for options in (
            {},
            {"decay": 0.5},
            {"d_kernel": 200},
            {"kernel_length": 9},
            {"length": 20, "kernel_length": 20},  # a restricted kernel reads any length
            {"project": False},
        )
    ),
    *(
        Form(TapeDLR, options, 100)
        for options in (
            {},
            {"length": 7, "hold": 2, "gate": True, "clock": "shared", "factors": 2},
            {"heads": 3, "lag_heads": 0, "clock": "own", "glu": True, "activation": "gelu"},
        )
    ),
    Form(Attention, {}, 100, many=True),
    Form(Attention, {"heads": 1, "glu": True}, 100, many=True),
    Form(AttentionFF, {}, 100, many=True),
    Form(LocalAttention, {}, 100),
    Form(LocalAttention, {"chunk": 1}, 100),
    Form(LocalAttention, {"chunk": 1000, "glu": True}, 100, many=True),
    Form(Experts, {}, 100),
    Form(Experts, {"experts": 1}, 100),
    Form(UsersMixer, {}, 100),
]
BIDIRECTIONAL = [
    *(Form(kind, {"bidirectional": True}) for kind in (DLR, DSS, S4D, S4, SGConv)),
    Form(DLR, {"bidirectional": True, "cast": "prod", "kernel_length": 9, "glu": True}),
    Form(GatedDLR, {"bidirectional": True, "real": True}),
    *(Form(kind, {"bidirectional": True, "kernel_length": 9}) for kind in (DSS, S4D)),
    Form(TapeDLR, {"bidirectional": True, "hold": 1, "gate": True, "clock": "shared"}, 100),
    Form(S4, {"bidirectional": True, "kernel_length": 9, "glu": True, "activation": "silu"}),
    Form(SGConv, {"bidirectional": True, "kernel_length": 20, "glu": True}),
    *(
        form._replace(options=form.options | {"bidirectional": True})
        for form in CAUSAL
        if issubclass(form.kind, Attention)
    ),
    Form(Experts, {"router": "top"}),
]
EVERY = CAUSAL + BIDIRECTIONAL
