"""What every mixer that is a convolution shares: skip, activation, linear map, and streaming."""

from typing import Any, Literal, cast, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from dlrnn import ops
from dlrnn.nn.mixer import Mixer
from dlrnn.nn.streaming import (
    Modes,
    RecurrentState,
    attached,
    initial_state,
    read_chunk,
    read_chunk_online,
    read_step,
)
from dlrnn.ops import OnlineState
from dlrnn.ops.checks import (
    require,
    require_count,
    require_device,
    require_dtype,
    require_finite,
    require_flags,
    require_probability,
    require_shape,
)

Activation = Literal["gelu", "silu", "relu", "identity"]
KernelState = RecurrentState | OnlineState


class HeldKernel:
    """A kernel of `held_kernels`: backward passes stop at its `leaf` until it is released."""

    def __init__(self, kernel: Tensor) -> None:
        self.kernel = kernel
        self.leaf = kernel.detach().requires_grad_(kernel.requires_grad)

    def release(self, *, backward: bool) -> None:
        """At the end the gradients go on to the parameters; later ones would be lost."""
        if backward and self.leaf.grad is not None:
            self.kernel.backward(self.leaf.grad)
        if self.leaf.requires_grad:
            self.leaf.register_hook(_refuse)


def _refuse(gradient: Tensor) -> None:
    del gradient
    raise ValueError(
        "backward() must be called inside held_kernels, not after it: zero the gradients, and again"
    )


class KernelMixer(Mixer[KernelState]):
    """`y = conv(K, u) + D u`, then activation, dropout and a linear map of the channels.

    A subclass gives the kernel, [H, K] (2 H rows when bidirectional: the second half reads from
    right to left), and, if its kernel is a sum of `W lambda^k`, the modes that make it stream as a
    recurrence: a step takes constant time and memory, wherever in the sequence. Any other kernel
    streams by online convolution: logarithmic time on average, and the inputs are kept.

    Args:
        d_model: channels, H.
        bidirectional: a second kernel reads from right to left; such a layer cannot stream.
        kernel_length: kernels are cut to this many entries.
        glu: the linear map makes 2 H channels and a GLU halves them.
        activation: "gelu", "silu", "relu" or "identity".
        dropout: probability, after the activation.
        project: False leaves out activation, dropout and linear map: a linear layer.
    """

    def __init__(
        self,
        d_model: int,
        *,
        bidirectional: bool,
        kernel_length: int | None,
        glu: bool,
        activation: Activation,
        dropout: float,
        project: bool,
    ) -> None:
        super().__init__()
        require_count("d_model", d_model)
        require_flags(bidirectional=bidirectional, glu=glu, project=project)
        if kernel_length is not None:
            require_count("kernel_length (None is no limit)", kernel_length)
        require(
            activation in get_args(Activation),
            f"activation must be one of {', '.join(get_args(Activation))}, not {activation!r}",
        )
        require_probability("dropout", dropout)
        require(
            project or not (glu or dropout),
            "project=False is a linear layer: it takes neither glu nor dropout",
        )
        require(
            project or activation in ("gelu", "identity"),
            f"project=False is a linear layer: activation={activation!r} would not be used",
        )
        self.d_model, self.bidirectional, self.kernel_length = d_model, bidirectional, kernel_length
        self.glu, self.activation, self.project = glu, activation, project
        self.dropout_p = float(dropout)
        self.held: dict[int, HeldKernel] | None = None  # see `held_kernels`
        self.D = nn.Parameter(torch.empty(d_model))
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()  # p = 0 would still copy
        self.out = nn.Linear(d_model, d_model * (2 if glu else 1)) if project else None

    @property
    def rows(self) -> int:
        """Kernels: H, or 2 H when bidirectional."""
        return self.d_model * (2 if self.bidirectional else 1)

    def reset_skip_and_out(self) -> None:
        """`D ~ N(0, 1)`; PyTorch's own initialisation of a linear map."""
        with torch.no_grad():
            self.D.normal_()
        if self.out is not None:
            self.out.reset_parameters()

    def options(self) -> dict[str, Any]:
        """The arguments that make this layer again: `type(layer)(**layer.options())`."""
        names = ("d_model", "bidirectional", "kernel_length", "glu", "activation", "project")
        return {name: getattr(self, name) for name in names} | {"dropout": self.dropout_p}

    def extra_repr(self) -> str:
        """What `print(layer)` shows."""
        flags = [name for name in ("bidirectional", "glu") if getattr(self, name)]
        limit = [f"kernel_length={self.kernel_length}"] if self.kernel_length else []
        return ", ".join((f"d_model={self.d_model}", *flags, *limit))

    # ------------------------------------------------------------------------------ the kernel

    def kernel(self, length: int) -> Float[Tensor, "rows K"]:
        """The first `min(length, kernel_length)` entries, [H, K]; 2 H rows if bidirectional."""
        if isinstance(length, float | str) or length < 1:
            raise ValueError(f"a kernel needs a whole length of at least 1, not {length!r}")
        for name in self.kernel_parameters:
            if (parameter := getattr(self, name)) is not None:
                require_finite(name, parameter)
        length = min(length, self.kernel_length or length)
        if self.held is None or (length not in self.held and not torch.is_grad_enabled()):
            return self._kernel(length)  # what has no gradient is not held
        if length not in self.held:
            self.held[length] = HeldKernel(self._kernel(length))
        return self.held[length].leaf

    def _kernel(self, length: int) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} must define _kernel")

    def _streaming_states(self) -> int | None:
        """States a channel of the recurrence with this kernel, None if there is no small one."""
        return None

    def _streaming_modes(self) -> Modes:
        """That recurrence."""
        raise NotImplementedError(f"{type(self).__name__} must define _streaming_modes")

    def _skip_kernel(self, length: int) -> Tensor:
        return self._with_skip(self.kernel(length))

    def _with_skip(self, kernel: Tensor) -> Tensor:
        """`conv(K, u) + D u = conv(K + D at entry 0, u)`."""
        require_finite("D", self.D)
        return kernel + F.pad(self.D[:, None], (0, kernel.shape[1] - 1))

    # ------------------------------------------------------------------------------ whole

    def _whole(self, u: Tensor, lengths: Tensor | None) -> Tensor:
        del lengths  # the zeros behind a sequence add nothing to it
        kernel = self.kernel(u.shape[1])
        right = self._with_skip(kernel[: self.d_model])
        left = kernel[self.d_model :] if self.bidirectional else None
        if not (
            _is_plain(self.out, nn.Linear) and _is_plain(self.dropout, nn.Dropout, nn.Identity)
        ):
            return self._mix(ops.convolution(u, right, left))
        out, dropout = cast("nn.Linear", self.out), 0.0
        weight = out.weight
        if isinstance(self.dropout, nn.Dropout) and self.dropout.training:
            # Activations map 0 to 0, so that dropout may come before them, and they and the linear
            # map stay one: what it keeps has its own size before, and the larger one behind.
            dropout, kept = self.dropout.p, 1 - self.dropout.p
            right, left, weight = kept * right, None if left is None else kept * left, weight / kept
        how: Any = {"activation": self.activation, "glu": self.glu, "dropout": dropout}
        return ops.mix(u, right, left, weight, out.bias, **how)

    def _mix(self, y: Tensor) -> Tensor:
        if self.out is None:
            return y
        y = y if self.activation == "identity" else getattr(F, self.activation)(y)
        y = self.out(self.dropout(y))
        return F.glu(y, dim=-1) if self.glu else y

    # ------------------------------------------------------------------------------ streaming

    def _initial_state(self, batch_size: int) -> KernelState:
        if self._streaming_states() is None:
            nothing = self.D.new_zeros(batch_size, 0, self.d_model)
            return ops.online_start(nothing, self._skip_kernel, self.kernel_length)
        return initial_state(self._streaming_modes(), batch_size, self.kernel_length)

    def _step(self, u: Tensor, state: KernelState) -> tuple[Tensor, KernelState]:
        y, state = self._read_step(u.to(self.D.dtype), state)
        return self._mix(y.to(u.dtype)), state

    def _chunk(
        self, u: Tensor, state: KernelState | None, lengths: Tensor | None
    ) -> tuple[Tensor, KernelState]:
        y, after = self._read_chunk(u.to(self.D.dtype), state, lengths)
        return self._mix(y.to(u.dtype)), after

    def _read_step(self, u: Tensor, state: KernelState) -> tuple[Tensor, KernelState]:
        if self._streaming_states() is None:
            known = self._attached_online(cast("OnlineState", state))
            return ops.online_step(u, known, self._skip_kernel, self.kernel_length)
        modes = self._streaming_modes()
        return read_step(u, modes, self._attached(cast("RecurrentState", state), modes))

    def _read_chunk(
        self, u: Tensor, state: KernelState | None, lengths: Tensor | None
    ) -> tuple[Tensor, KernelState]:
        window = self.kernel_length
        if self._streaming_states() is None:
            before = cast("OnlineState | None", state)
            before = None if before is None else self._attached_online(before)
            return read_chunk_online(u, self._skip_kernel, before, lengths=lengths, window=window)
        known, modes = cast("RecurrentState | None", state), self._streaming_modes()
        known = None if known is None else self._attached(known, modes)
        return read_chunk(u, modes, self._skip_kernel, known, lengths=lengths, window=window)

    def _attached(self, state: RecurrentState, modes: Modes) -> RecurrentState:
        """A state made without gradients (or detached) gets them, where the inputs are known."""
        wanted = self.kernel_length and modes.log_lambda.requires_grad
        if not wanted or state.x.requires_grad or not _records():
            return state
        return attached(state, modes)

    def _attached_online(self, state: OnlineState) -> OnlineState:
        own = (getattr(self, name) for name in (*self.kernel_parameters, "D"))
        wanted = any(parameter is not None and parameter.requires_grad for parameter in own)
        if not wanted or state.kernel.requires_grad or not _records():
            return state
        history = state.history() if state.blocks else self.D.new_zeros(0, 0, self.d_model)
        return ops.online_start(history, self._skip_kernel, self.kernel_length)

    # ------------------------------------------------------------------------------ checks

    def _parameter(self) -> Tensor:
        return self.D

    def _check_state(self, state: KernelState, batch: int) -> None:
        states = self._streaming_states()
        kind = OnlineState if states is None else RecurrentState
        require(
            isinstance(state, kind),
            f"this layer's state is a {kind.__name__}, not a {type(state).__name__}",
        )
        parameter = self.D
        if isinstance(state, RecurrentState) and states is not None:
            dtype = torch.float64 if self.kernel_length else parameter.dtype
            past = (batch, self.kernel_length or 0, self.d_model)
            require_shape("state.x", state.x, (batch, self.d_model, states, 2))
            require_shape("state.past", state.past, past)
            require_dtype("state.x", state.x, (dtype,))
            require_dtype("state.past", state.past, (parameter.dtype,))
            for name, part in zip(state._fields, state, strict=True):
                require_device(f"state.{name}", part, parameter.device)
        elif isinstance(state, OnlineState):
            require_dtype("state.kernel", state.kernel, (parameter.dtype,))
            require_device("state.kernel", state.kernel, parameter.device)
            for block in state.blocks[:1]:
                require_shape("a block of the state", block.inputs, (batch, "p", self.d_model))


def _is_plain(module: nn.Module | None, *kinds: type[nn.Module]) -> bool:
    """PyTorch's own, and nobody looks at it or changes it when it is called: weight norm, pruning,
    adapters.
    """
    return module is not None and type(module) in kinds and not _has_hooks(module)


def _has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def _records() -> bool:
    return torch.is_grad_enabled() and not torch.compiler.is_exporting()
