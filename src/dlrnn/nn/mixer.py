"""The contract of every mixer (`Mixer`), and what every long convolution shares (`KernelMixer`).

A mixer maps [B, L, H] to [B, L, H]: whole sequences, chunks after a state, or single steps, with
the same answer. `nn/dlr.py` is the mixer to read first.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from numbers import Integral
from typing import Any, ClassVar, Generic, Literal, TypedDict, TypeVar, cast, get_args

import torch
from jaxtyping import Float, Integer
from torch import SymInt, Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

from dlrnn import ops
from dlrnn.nn.layers import is_unmodified, keeping_fp32
from dlrnn.nn.optim import KERNEL_LR
from dlrnn.nn.streaming import (
    InPlaceState,
    Modes,
    RecurrentState,
    StepModes,
    attached,
    initial_state,
    read_chunk,
    read_chunk_online,
    read_step,
)
from dlrnn.ops import OnlineState
from dlrnn.ops.checks import (
    FLOATING,
    HALF,
    REAL,
    may_read,
    needs_autocast,
    require,
    require_count,
    require_device,
    require_dtype,
    require_finite,
    require_flags,
    require_probability,
    require_shape,
)

CONTIGUOUS = torch.contiguous_format
State = TypeVar("State")
Activation = Literal["gelu", "silu", "relu", "identity"]
KernelState = RecurrentState | InPlaceState | OnlineState


class Mixer(nn.Module, ABC, Generic[State]):
    """Maps [B, L, H] to [B, L, H]: whole, in chunks or step by step, with the same answer.

    This class checks inputs and masks padding. A subclass sets `d_model` and `bidirectional`, and
    defines `_whole`, `_chunk` and `_step`, which get inputs that were checked.
    """

    kernel_parameters: ClassVar[tuple[str, ...]] = ()
    """Names of the parameters that make a kernel: `param_groups` gives them no weight decay."""

    kernel_lr: ClassVar[float | None] = None
    """The largest rate that we recommend for them under Adam, if there is one."""

    cannot_stream: ClassVar[str] = (
        "a bidirectional layer reads the future: it has no state and cannot stream"
    )

    d_model: int
    bidirectional: bool

    def forward(
        self,
        x: Float[Tensor, "B L H"],
        state: State | None = None,
        *,
        return_state: bool = False,
        lengths: Integer[Tensor, " B"] | None = None,
    ) -> Any:
        """Returns y [B, L, H], or (y, state) if `return_state`.

        `state` is that of the positions before x. `lengths` are the true lengths of a padded batch:
        positions beyond them are ignored, and the output there is 0. An x in 16 bits is answered in
        16 bits, as under autocast.
        """
        if needs_autocast(x):
            with torch.autocast(x.device.type, x.dtype):
                return self.forward(x, state, return_state=return_state, lengths=lengths)
        u, lengths, padding = self._checked(x, lengths)
        if state is None and not return_state:
            y = self._whole(u, lengths)
        else:
            self._check_streams()
            if state is not None:
                self._check_state(state, x.shape[0])
            y, state = self._chunk(u, state, lengths)
        if padding is not None:
            y = y.masked_fill(padding, 0)
        return (y, state) if return_state else y

    def step(
        self, x: Float[Tensor, "B H"], state: State | None = None
    ) -> tuple[Float[Tensor, "B H"], State]:
        """One position: `y_t, state = layer.step(x_t, state)`."""
        if needs_autocast(x):
            with torch.autocast(x.device.type, x.dtype):
                return self.step(x, state)
        check_input(x, ("B", self.d_model), self._parameter())
        require_finite("x", x)
        self._check_streams()
        state = self.initial_state(x.shape[0]) if state is None else state
        self._check_state(state, x.shape[0])
        return self._step(x, state)

    def initial_state(self, batch_size: int) -> State:
        """The state before the first position."""
        self._check_streams()
        given: object = batch_size
        whole = isinstance(given, int | Integral | SymInt) and not isinstance(given, bool)
        if not whole or batch_size < 0:
            raise ValueError(f"batch_size must be a whole number of at least 0, not {batch_size!r}")
        return self._initial_state(batch_size)

    def in_place(self, state: State, steps: int) -> Any:
        """The same state for `CapturedSteps`: in tensors of its own, with room for `steps` steps.

        A mixer whose steps overwrite it returns it from `step`; others are copied.
        """
        del steps
        return tree_map_only(Tensor, partial(torch.clone, memory_format=CONTIGUOUS), state)

    def grow(self, length: int) -> None:
        """Prepare for sequences of up to `length` positions, in training at growing lengths.

        A mixer with parameters that depend on a length replaces them by longer ones, which keep
        what was learned, and its optimizer must be made anew. The others do nothing.
        """
        require_count("length", length)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As PyTorch's; kernel parameters get the tags that other optimizer tooling reads.

        No parameter beside a kernel has 16 bits, whatever the default dtype is.
        """
        if param is not None and self.kernel_parameters and param.dtype in HALF:
            param = nn.Parameter(param.detach().float(), param.requires_grad)
        super().register_parameter(name, param)
        if name in self.kernel_parameters and not (param is None or hasattr(param, "_optim")):
            tags: Any = param
            rate = {} if self.kernel_lr is None else {"lr": self.kernel_lr}
            tags._no_weight_decay, tags._optim = True, {**rate, "weight_decay": 0.0}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._register_again()  # copies of parameters have no tags

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        convert = keeping_fp32(fn, self._kept_in_fp32())  # `.to(torch.bfloat16)` and the like
        super()._apply(convert, recurse)  # type: ignore[no-untyped-call]
        self._register_again()  # `to_empty` makes new parameters
        return self

    def _kept_in_fp32(self) -> list[Tensor]:
        """Parameters and buffers that 16 bits would spoil: every one of a layer with a kernel."""
        return [*self.parameters(), *self.buffers()] if self.kernel_parameters else []

    def _register_again(self) -> None:
        for name in self.kernel_parameters:
            if (param := self._parameters.get(name)) is not None:
                self.register_parameter(name, param)

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters without weight decay, as timm asks a model for them."""
        return set(self.kernel_parameters)

    @property
    def sees_padding(self) -> bool:
        """Whether values in the padding can change the output at valid positions."""
        return self.bidirectional

    def _checked(
        self, x: Tensor, lengths: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The input with zeros for its padding; the lengths as int64; the mask of the padding."""
        check_input(x, ("B", "L", self.d_model), self._parameter())
        padding = None
        if lengths is not None:
            lengths = checked_lengths(x, lengths)
            padding = beyond(x, lengths)
            x = x.masked_fill(padding, 0)
        require_finite("x", x)
        return x, lengths, padding

    def _check_streams(self) -> None:
        require(not self.bidirectional, self.cannot_stream)

    @abstractmethod
    def _parameter(self) -> Tensor:
        """One of the layer's parameters, for its dtype and device."""

    @abstractmethod
    def _whole(self, u: Tensor, lengths: Tensor | None) -> Tensor:
        """The output for whole sequences [B, L, H]."""

    @abstractmethod
    def _chunk(
        self, u: Tensor, state: State | None, lengths: Tensor | None
    ) -> tuple[Tensor, State]:
        """The output for a chunk after `state` (None: the first chunk), and the next state."""

    @abstractmethod
    def _step(self, u: Tensor, state: State) -> tuple[Tensor, State]:
        """The output for a position [B, H] after `state`, and the next state."""

    @abstractmethod
    def _initial_state(self, batch_size: int) -> State:
        """The state before the first position."""

    @abstractmethod
    def _check_state(self, state: State, batch: int) -> None:
        """Raises ValueError unless `state` is one of this layer for a batch of this size."""


# ---------------------------------------------------------------------------------- inputs


def check_input(x: Tensor, shape: tuple[int | str, ...], parameter: Tensor) -> None:
    """The input has this shape, at least one position, and the device and dtype of the parameter.

    Under autocast each may be in half precision or in fp32. Letters in `shape` stand for any size.
    """
    if (
        isinstance(x, Tensor)  # type: ignore[redundant-expr]
        and x.dim() == len(shape)
        and x.shape[-1] == shape[-1]
        and x.dtype == parameter.dtype
        and x.dtype in REAL
        and x.device == parameter.device
        and (x.dim() < 3 or x.shape[1] > 0)
    ):
        return
    require_dtype("the parameters of a layer", parameter, FLOATING)
    require_shape("x", x, shape)
    require_device("x", x, parameter.device)
    if x.dtype != parameter.dtype:
        casts = {x.dtype, parameter.dtype} <= {torch.float32, *HALF}
        if not (casts and torch.is_autocast_enabled(x.device.type)):
            have, need = (str(d).removeprefix("torch.") for d in (x.dtype, parameter.dtype))
            cure = "convert x or the layer with .to()"
            cure += ", or use torch.autocast" if casts else ""
            raise ValueError(f"x must be {need}, not {have}: {cure}")
    if x.dim() == 3 and x.shape[1] == 0:
        raise ValueError("x has length 0: give it at least one position")


def checked_lengths(x: Tensor, lengths: Tensor) -> Tensor:
    """The lengths as int64. On a GPU, values are not read: those out of range are clamped."""
    require_shape("lengths", lengths, (x.shape[0],))
    whole = not (lengths.is_floating_point() or lengths.is_complex())
    name = str(lengths.dtype).removeprefix("torch.")
    require(whole and lengths.dtype != torch.bool, f"lengths must be whole numbers, not {name}")
    require_device("lengths", lengths, x.device)
    lengths = lengths.long()
    if may_read(lengths):
        low, high = int(lengths.min()), int(lengths.max())
        if low < 0 or high > x.shape[1]:
            raise ValueError(
                f"lengths must lie between 0 and {x.shape[1]}, the length of x; got values from"
                f" {low} to {high}"
            )
    return lengths.clamp(0, x.shape[1])


def beyond(x: Tensor, lengths: Tensor) -> Tensor:
    """[B, L, 1], true where a position lies beyond its sequence."""
    return (torch.arange(x.shape[1], device=x.device) >= lengths[:, None])[..., None]


# ---------------------------------------------------------------------------------- convolutions


class KernelMixerOptions(TypedDict, total=False):
    """What every `KernelMixer` takes by name; its docstring says what each option means."""

    bidirectional: bool
    kernel_length: int | None
    glu: bool
    activation: Activation
    dropout: float
    project: bool


class KernelMixer(Mixer[KernelState]):
    """`y = conv(K, u) + D u`, then activation, dropout and a linear map of the channels.

    A subclass defines `_kernel`, [H, K] (2 H rows when bidirectional: the second half reads from
    right to left). If its kernel is a sum of `W lambda^k`, it also defines the modes that make it
    stream as a recurrence, in constant time and memory a step. Any other kernel streams by online
    convolution, in logarithmic time on average, and keeps the inputs.

    Args:
        d_model: channels, H.
        bidirectional: a second kernel reads from right to left; such a layer cannot stream.
        kernel_length: restricts kernels to this many entries; None is no limit.
        glu: the linear map makes 2 H channels and a GLU halves them.
        activation: "gelu", "silu", "relu" or "identity".
        dropout: probability, after the activation.
        project: False leaves out activation, dropout and linear map: a linear layer.
    """

    kernel_lr: ClassVar[float | None] = KERNEL_LR
    option_names: ClassVar[tuple[str, ...]] = ()
    """The options of a subclass, whose values are attributes of the same names."""

    shown_options: ClassVar[tuple[str, ...]] = ("d_state",)
    """Those of them that `print(layer)` shows."""

    def __init__(
        self,
        d_model: int,
        *,
        bidirectional: bool = False,
        kernel_length: int | None = None,
        glu: bool = False,
        activation: Activation = "gelu",
        dropout: float = 0.0,
        project: bool = True,
    ) -> None:
        super().__init__()
        require_count("d_model", d_model)
        require_flags(bidirectional=bidirectional, glu=glu, project=project)
        if kernel_length is not None:
            require_count("kernel_length (None is no limit)", kernel_length)
        require_probability("dropout", dropout)
        if activation not in get_args(Activation):
            known = ", ".join(get_args(Activation))
            raise ValueError(f"activation must be one of {known}, not {activation!r}")
        if not project and (glu or dropout):
            raise ValueError("project=False is a linear layer: it takes neither glu nor dropout")
        if not project and activation not in ("gelu", "identity"):
            unused = f"activation={activation!r} would not be used"
            raise ValueError(f"project=False is a linear layer: {unused}")
        self.d_model, self.bidirectional, self.kernel_length = d_model, bidirectional, kernel_length
        self.rows = 2 * d_model if bidirectional else d_model  # of the kernel
        self.glu, self.activation, self.project = glu, activation, project
        self.dropout_p = float(dropout)
        self.reused: dict[int, ReusedKernel] | None = None  # see `reuse_kernels`
        self.D = nn.Parameter(torch.empty(d_model))
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()  # p = 0 would still copy
        columns, dtype = d_model * (2 if glu else 1), self.D.dtype  # fp32 where the default is bf16
        self.out = nn.Linear(d_model, columns, dtype=dtype) if project else None

    def reset_skip_and_out(self) -> None:
        """`D ~ N(0, 1)`; PyTorch's own initialisation of a linear map."""
        with torch.no_grad():
            self.D.normal_()
        if self.out is not None:
            self.out.reset_parameters()

    def options(self) -> dict[str, Any]:
        """The arguments that make this layer again: `type(layer)(**layer.options())`."""
        shared = ("d_model", "bidirectional", "kernel_length", "glu", "activation", "project")
        names = (*shared, *self.option_names)
        return {name: getattr(self, name) for name in names} | {"dropout": self.dropout_p}

    def extra_repr(self) -> str:
        """What `print(layer)` shows."""
        flags = [name for name in ("bidirectional", "glu") if getattr(self, name)]
        limit = [f"kernel_length={self.kernel_length}"] if self.kernel_length else []
        own = [f"{name}={getattr(self, name)!r}" for name in self.shown_options]
        return ", ".join((f"d_model={self.d_model}", *flags, *limit, *own))

    # ------------------------------------------------------------------------------ the kernel

    def kernel(self, length: int) -> Float[Tensor, "rows K"]:
        """The first `min(length, kernel_length)` entries, [H, K]; 2 H rows if bidirectional."""
        if isinstance(length, float | str) or length < 1:
            raise ValueError(
                f"the length of a kernel must be a whole number of at least 1, not {length!r}"
            )
        length = min(length, self.kernel_length or length)
        reused = self.reused
        if reused is not None and length in reused:
            return reused[length].leaf
        kernel = self._kernel(length)
        if type(kernel) is Tensor and kernel.is_cpu and not torch.compiler.is_compiling():
            total = (kernel.detach().sum() + self.D.detach().sum()).item()
            if not math.isfinite(total):  # name the parameter that is not finite
                for name in (*self.kernel_parameters, "D"):
                    if (parameter := getattr(self, name)) is not None:
                        require_finite(name, parameter)
        if reused is None or not torch.is_grad_enabled():
            return kernel
        reused[length] = ReusedKernel(kernel)
        return reused[length].leaf

    def _kernel(self, length: int) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} must define _kernel")

    def _streaming_states(self) -> int | None:
        """States a channel of the recurrence with this kernel, None if there is no small one."""
        return None

    def _streaming_modes(self) -> Modes:
        """The modes of that recurrence."""
        raise NotImplementedError(f"{type(self).__name__} must define _streaming_modes")

    def _step_modes(self) -> Modes | StepModes:
        """The same for one step."""
        return self._streaming_modes()

    def _skip_kernel(self, length: int) -> Tensor:
        """The kernel of `conv(K, u) + D u`: D is added to entry 0."""
        return ops.with_skip(self.kernel(length), self.D)

    # ------------------------------------------------------------------------------ whole

    def _whole(self, u: Tensor, lengths: Tensor | None) -> Tensor:
        del lengths  # the zeros behind a sequence add nothing to it
        kernel = self.kernel(u.shape[1])
        right = kernel[: self.d_model] if self.bidirectional else kernel
        return self._mixed(u, right, kernel[self.d_model :] if self.bidirectional else None)

    def _mixed(self, u: Tensor, right: Tensor, left: Tensor | None) -> Tensor:
        """`conv(K, u) + D u` and output stage: by `ops.mix` on a GPU or with active dropout."""
        drops = isinstance(self.dropout, nn.Dropout) and self.dropout.training
        if not ((u.is_cuda or drops) and self._has_plain_output_stage()):
            return self._output(ops.convolution(u, right, left, self.D))
        out, between = cast("nn.Linear", self.out), None
        skip: Tensor = self.D
        weight: Tensor = out.weight
        if drops:
            # Activations map 0 to 0, so dropout may come before them, which leaves activation and
            # linear map one op. What dropout keeps is scaled behind the activation: in `weight`.
            p = cast("nn.Dropout", self.dropout).p
            kept, between = 1 - p, partial(F.dropout, p=p)
            right, left = kept * right, None if left is None else kept * left
            skip, weight = kept * skip, weight / kept
        how: Any = {"activation": self.activation, "glu": self.glu, "between": between}
        return ops.mix(u, right, left, weight, out.bias, skip=skip, **how)

    def _has_plain_output_stage(self) -> bool:
        """Whether dropout and linear map are PyTorch's own: fused kernels may replace them."""
        dropouts = nn.Dropout, nn.Identity
        return is_unmodified(self.out, nn.Linear) and is_unmodified(self.dropout, *dropouts)

    def _output(self, y: Tensor) -> Tensor:
        """The output stage: activation, dropout, linear map of the channels, GLU."""
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

    def in_place(self, state: KernelState, steps: int) -> Any:
        """The state that steps overwrite, if it is a recurrence's."""
        state = super().in_place(state, steps)
        return InPlaceState(*state) if isinstance(state, RecurrentState) else state

    def _step(self, u: Tensor, state: KernelState) -> tuple[Tensor, KernelState]:
        y, state = self._read_step(u.to(self.D.dtype), state)
        return self._output(y.to(u.dtype)), state

    def _chunk(
        self, u: Tensor, state: KernelState | None, lengths: Tensor | None
    ) -> tuple[Tensor, KernelState]:
        y, after = self._read_chunk(u.to(self.D.dtype), state, lengths)
        return self._output(y.to(u.dtype)), after

    def _read_step(self, u: Tensor, state: KernelState) -> tuple[Tensor, KernelState]:
        if self._streaming_states() is None:
            known = self._attached_online(cast("OnlineState", state))
            return ops.online_step(u, known, self._skip_kernel, self.kernel_length)
        if isinstance(state, InPlaceState):
            require(not torch.is_grad_enabled(), "steps in place record no gradients: no_grad()")
            return read_step(u, self._step_modes(), state)
        before = self._attached(cast("RecurrentState", state))
        return read_step(u, self._step_modes(), before)

    def _read_chunk(
        self, u: Tensor, state: KernelState | None, lengths: Tensor | None
    ) -> tuple[Tensor, KernelState]:
        window = self.kernel_length
        if self._streaming_states() is None:
            before = cast("OnlineState | None", state)
            before = None if before is None else self._attached_online(before)
            return read_chunk_online(u, self._skip_kernel, before, lengths=lengths, window=window)
        known, modes = cast("RecurrentState | None", state), self._streaming_modes()
        known = None if known is None else self._attached(known)
        return read_chunk(u, modes, self._skip_kernel, known, lengths=lengths, window=window)

    def _attached(self, state: RecurrentState) -> RecurrentState:
        """A state made without gradients (or detached) gets them, where the inputs are known."""
        if not self.kernel_length or state.x.requires_grad or not _records_gradients():
            return state
        modes = self._streaming_modes()
        return attached(state, modes) if modes.log_lambda.requires_grad else state

    def _attached_online(self, state: OnlineState) -> OnlineState:
        parameters = (getattr(self, name) for name in (*self.kernel_parameters, "D"))
        needed = any(p is not None and p.requires_grad for p in parameters)
        if not needed or state.kernel.requires_grad or not _records_gradients():
            return state
        history = state.history() if state.blocks else self.D.new_zeros(0, 0, self.d_model)
        return ops.online_start(history, self._skip_kernel, self.kernel_length)

    def _parameter(self) -> Tensor:
        return self.D

    def _check_state(self, state: KernelState, batch: int) -> None:
        states = self._streaming_states()
        kind = OnlineState if states is None else RecurrentState
        fits = isinstance(state, kind if states is None else RecurrentState | InPlaceState)
        require(fits, f"this layer's state is a {kind.__name__}, not a {type(state).__name__}")
        parameter = self.D
        if not isinstance(state, OnlineState) and states is not None:
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


def _records_gradients() -> bool:
    return torch.is_grad_enabled() and not torch.compiler.is_exporting()


class ReusedKernel:
    """A kernel of `reuse_kernels`: backward passes stop at its `leaf` until it is released."""

    def __init__(self, kernel: Tensor) -> None:
        self.kernel = kernel
        self.leaf = kernel.detach().requires_grad_(kernel.requires_grad)

    def release(self, *, backward: bool) -> None:
        """Pass the gradients on to the parameters; a later backward pass raises."""
        if backward and self.leaf.grad is not None:
            self.kernel.backward(self.leaf.grad)
        if self.leaf.requires_grad:
            self.leaf.register_hook(_refuse)


def _refuse(gradient: Tensor) -> None:
    del gradient
    raise ValueError(
        "backward() ran after reuse_kernels closed: zero the gradients, and run forward and"
        " backward inside it"
    )
