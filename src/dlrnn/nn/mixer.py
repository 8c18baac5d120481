"""The contract of every mixer: whole sequences, chunks after a state, single steps."""

from abc import ABC, abstractmethod
from numbers import Integral
from typing import ClassVar, Generic, Literal, TypeVar, overload

from jaxtyping import Float, Integer
from torch import SymInt, Tensor, nn

from dlrnn.nn.inputs import beyond, check_input, checked_lengths
from dlrnn.ops.checks import require, require_finite

State = TypeVar("State")


class Mixer(nn.Module, ABC, Generic[State]):
    """Maps [B, L, H] to [B, L, H]: whole, in chunks or step by step, with the same answer.

    What is asked of the input is asked here. A subclass sets `d_model` and `bidirectional`, and
    says what comes of an input that has been checked, with zeros for its padding.
    """

    kernel_parameters: ClassVar[tuple[str, ...]] = ()
    """The parameters that make a kernel: no weight decay, see `param_groups`."""

    reads_ahead: ClassVar[str] = (
        "a bidirectional layer reads the future: it has no state and cannot stream"
    )

    d_model: int
    bidirectional: bool

    @overload
    def forward(
        self, x: Tensor, state: State | None = ..., *, lengths: Tensor | None = ...
    ) -> Tensor: ...
    @overload
    def forward(
        self,
        x: Tensor,
        state: State | None = ...,
        *,
        return_state: Literal[True],
        lengths: Tensor | None = ...,
    ) -> tuple[Tensor, State]: ...
    @overload
    def forward(
        self,
        x: Tensor,
        state: State | None = ...,
        *,
        return_state: bool,
        lengths: Tensor | None = ...,
    ) -> Tensor | tuple[Tensor, State]: ...
    def forward(
        self,
        x: Float[Tensor, "B L H"],
        state: State | None = None,
        *,
        return_state: bool = False,
        lengths: Integer[Tensor, " B"] | None = None,
    ) -> Float[Tensor, "B L H"] | tuple[Float[Tensor, "B L H"], State]:
        """Read x after `state`; `lengths` are the true lengths of a padded batch.

        What lies beyond a sequence's length is ignored, and the output there is 0.
        """
        check_input(x, ("B", "L", self.d_model), self._parameter())
        padding = None
        if lengths is not None:
            lengths = checked_lengths(x, lengths)
            padding = beyond(x, lengths)
        u = x if padding is None else x.masked_fill(padding, 0)
        require_finite("x", u)
        if not return_state and state is None:
            y = self._whole(u, lengths)
            return y if padding is None else y.masked_fill(padding, 0)
        self._check_streams()
        if state is not None:
            self._check_state(state, x.shape[0])
        y, after = self._chunk(u, state, lengths)
        y = y if padding is None else y.masked_fill(padding, 0)
        return (y, after) if return_state else y

    def initial_state(self, batch_size: int) -> State:
        """The state before the first position."""
        self._check_streams()
        given: object = batch_size
        whole = isinstance(given, int | Integral | SymInt) and not isinstance(given, bool)
        if not whole or batch_size < 0:
            raise ValueError(f"batch_size must be a whole number of at least 0, not {batch_size!r}")
        return self._initial_state(batch_size)

    def step(
        self, x: Float[Tensor, "B H"], state: State | None = None
    ) -> tuple[Float[Tensor, "B H"], State]:
        """One position: `y_t, state = layer.step(x_t, state)`."""
        check_input(x, ("B", self.d_model), self._parameter())
        require_finite("x", x)
        self._check_streams()
        state = self.initial_state(x.shape[0]) if state is None else state
        self._check_state(state, x.shape[0])
        return self._step(x, state)

    @property
    def sees_padding(self) -> bool:
        """Whether finite numbers behind a sequence's end can change its answer."""
        return self.bidirectional

    def _check_streams(self) -> None:
        require(not self.bidirectional, self.reads_ahead)

    # ------------------------------------------------------------------------------ to be said

    @abstractmethod
    def _parameter(self) -> Tensor:
        """One of its parameters: of their dtype, on their device."""

    @abstractmethod
    def _whole(self, u: Tensor, lengths: Tensor | None) -> Tensor:
        """The answer to whole sequences."""

    @abstractmethod
    def _chunk(
        self, u: Tensor, state: State | None, lengths: Tensor | None
    ) -> tuple[Tensor, State]:
        """The answer to a chunk after `state` (None: the first), and the state behind it."""

    @abstractmethod
    def _step(self, u: Tensor, state: State) -> tuple[Tensor, State]:
        """The answer to a position [B, H] after `state`, and the state behind it."""

    @abstractmethod
    def _initial_state(self, batch_size: int) -> State:
        """The state before the first position."""

    @abstractmethod
    def _check_state(self, state: State, batch: int) -> None:
        """It is one of this layer, for a batch of this size, or a sentence says what it is."""
