"""The gated DLR: a DLR between two products, for tasks that multiply what they sum."""

from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from dlrnn.nn.dlr import DLR, Cast
from dlrnn.nn.mixer import KernelState, Mixer
from dlrnn.ops.checks import require_flags, require_probability


class GatedDLR(Mixer[KernelState]):
    """`y = q * DLR(k * v)`, then dropout and a linear map; q, k and v are linear maps of the input.

    `*` multiplies channel by channel. The DLR is linear, without an output stage, and has the
    layer's states; with a kernel of ones and q = 1 the layer sums the products `k_j v_j`.

        layer = GatedDLR(d_model=64, d_state=1024)
        y = layer(x)                                  # x, y [B, L, 64]
        y, state = layer(x, return_state=True)        # read a prefix ...
        y_t, state = layer.step(x_t, state)           # ... and go on step by step, x_t [B, 64]

    Args:
        d_model: channels, H; also those of q, k and v.
        d_state: states of the DLR, N.
        bidirectional: the DLR has a second kernel, which reads from right to left; such a layer
            cannot stream.
        cast: "real" or "prod", as in `DLR`.
        real: real lambda and W, as in `DLR`.
        kernel_length: restricts kernels to this many entries; None is no limit.
        dt_min: with dt_max, bounds of `-2 log |lambda|` at initialisation (log-uniform).
        dt_max: see dt_min; smaller is a longer memory.
        glu: the linear map makes 2 H channels and a GLU halves them.
        dropout: probability, before the linear map.
    """

    option_names: ClassVar[tuple[str, ...]] = (
        *("d_model", "d_state", "bidirectional", "cast", "real", "kernel_length"),
        *("dt_min", "dt_max"),
    )

    def __init__(
        self,
        d_model: int,
        d_state: int,
        *,
        bidirectional: bool = False,
        cast: Cast = "real",
        real: bool = False,
        kernel_length: int | None = None,
        dt_min: float = 5e-4,
        dt_max: float = 0.5,
        glu: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        require_flags(glu=glu)
        require_probability("dropout", dropout)
        self.dlr = DLR(
            d_model,
            d_state,
            bidirectional=bidirectional,
            cast=cast,
            real=real,
            kernel_length=kernel_length,
            dt_min=dt_min,
            dt_max=dt_max,
            project=False,
        )
        self.d_model, self.bidirectional = d_model, bidirectional
        self.glu, self.dropout_p = glu, float(dropout)
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.out = nn.Linear(d_model, d_model * (2 if glu else 1))

    def reset_parameters(self) -> None:
        """DLR's initialisation, and PyTorch's of linear maps."""
        for module in (self.dlr, self.qkv, self.out):
            module.reset_parameters()

    def options(self) -> dict[str, Any]:
        """The arguments that make this layer again: `type(layer)(**layer.options())`."""
        made = {name: getattr(self.dlr, name) for name in self.option_names}
        return made | {"glu": self.glu, "dropout": self.dropout_p}

    def extra_repr(self) -> str:
        """What `print(layer)` shows, before the DLR."""
        return f"d_model={self.d_model}" + (", glu" if self.glu else "")

    # ------------------------------------------------------------------------------ the layer

    def _whole(self, u: Tensor, lengths: Tensor | None) -> Tensor:
        q, kv = self._gates(u)
        return self._output(q * self.dlr(kv, lengths=lengths))

    def _chunk(
        self, u: Tensor, state: KernelState | None, lengths: Tensor | None
    ) -> tuple[Tensor, KernelState]:
        q, kv = self._gates(u)
        y, after = self.dlr(kv, state, return_state=True, lengths=lengths)
        return self._output(q * y), after

    def _step(self, u: Tensor, state: KernelState) -> tuple[Tensor, KernelState]:
        q, kv = self._gates(u)
        y, after = self.dlr.step(kv, state)
        return self._output(q * y), after

    def _gates(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """`q` and `k * v`, [..., H]."""
        q, k, v = self.qkv(u).chunk(3, dim=-1)
        return q, k * v

    def _output(self, y: Tensor) -> Tensor:
        """The output stage: dropout, linear map, GLU."""
        y = self.out(self.dropout(y))
        return F.glu(y, dim=-1) if self.glu else y

    # ------------------------------------------------------------------------------ streaming

    def _initial_state(self, batch_size: int) -> KernelState:
        return self.dlr.initial_state(batch_size)

    def in_place(self, state: KernelState, steps: int) -> Any:
        """The state of the DLR, which steps overwrite."""
        return self.dlr.in_place(state, steps)

    def _parameter(self) -> Tensor:
        return self.dlr.D

    def _check_state(self, state: KernelState, batch: int) -> None:
        """The DLR, which takes the state, checks it."""
