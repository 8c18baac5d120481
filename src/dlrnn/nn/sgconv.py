"""SGConv: a long convolution whose kernel is coarser the further back it reads."""

import math
from typing import ClassVar, Unpack

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from dlrnn.nn.mixer import KernelMixer, KernelMixerOptions, KernelState
from dlrnn.ops import OnlineState
from dlrnn.ops.checks import require, require_count, require_positive


class SGConv(KernelMixer):
    """`y = conv(K, u) + D u`, then activation, dropout and a linear map of the channels.

    The kernel of a channel is `K = [k_0, a up(k_1, 1), a^2 up(k_2, 2), a^3 up(k_3, 4), ...] / Z`:
    `scales` sub-kernels of d entries, each but the first two upsampled twice as much as the one
    before it, a is the decay, and the constant Z is the norm of that kernel at initialisation.

        layer = SGConv(d_model=32, length=2**18)
        y = layer(x)                                  # x, y [B, L, 32], L <= 2**18

    Streaming is online convolution: `layer.step(x_t, state)` keeps the inputs.

    Args:
        d_model: channels, H.
        length: the longest input it is built for; decides the number of scales.
        d_kernel: parameters of a sub-kernel, d.
        decay: the factor a from one scale to the next; 1 is none, as in the paper.
        options: bidirectional, kernel_length, glu, activation, dropout and project, as in
            `KernelMixer`; with a kernel_length, an input may be of any length.
    """

    kernel_parameters: ClassVar[tuple[str, ...]] = ("sub_kernels",)
    option_names: ClassVar[tuple[str, ...]] = ("length", "d_kernel", "decay")
    shown_options: ClassVar[tuple[str, ...]] = ("length", "d_kernel", "scales", "decay")
    kernel_norm: Tensor

    def __init__(
        self,
        d_model: int,
        *,
        length: int,
        d_kernel: int = 4096,
        decay: float = 1.0,
        **options: Unpack[KernelMixerOptions],
    ) -> None:
        super().__init__(d_model, **options)
        require_count("length", length)
        require_count("d_kernel", d_kernel)
        require_positive("decay", decay, most=1.0)
        require(
            self.kernel_length is None or self.kernel_length <= length,
            f"kernel_length must be at most length, {length}, not {self.kernel_length}",
        )
        self.length, self.d_kernel, self.decay = length, d_kernel, float(decay)
        self.sub_kernels = nn.Parameter(torch.empty(self.rows, self.scales, d_kernel))
        self.register_buffer("kernel_norm", self.D.new_empty(self.rows))
        self.reset_parameters()

    @property
    def scales(self) -> int:
        """Sub-kernels: `ceil(1 + log2(max(length / d, 2) - 1))`, together `2^(scales-1) d` long."""
        return math.ceil(1 + math.log2(max(self.length / self.d_kernel, 2) - 1))

    def reset_parameters(self) -> None:
        """`N(0, d^-2)`, the paper's; then every channel's kernel has norm 1."""
        with torch.no_grad():
            self.sub_kernels.normal_(std=1 / self.d_kernel)
            self.kernel_norm.copy_(self._concatenated().norm(dim=-1))
        self.reset_skip_and_out()

    def grow(self, length: int) -> None:
        """Append newly drawn sub-kernels up to `length`; the entries there are stay the same."""
        require_count("length", length)
        old, self.length = self.sub_kernels, max(length, self.length)
        if self.scales == old.shape[1]:
            return
        added = old.new_empty(self.rows, self.scales - old.shape[1], self.d_kernel)
        added = added.normal_(std=1 / self.d_kernel)
        longer = torch.cat((old.detach(), added), dim=1)
        self.sub_kernels = nn.Parameter(longer, requires_grad=old.requires_grad)

    def _concatenated(self) -> Tensor:
        """The kernel before it is cut and divided, [rows, 2^(scales-1) d]."""
        pieces = [
            self.decay**i * upsample(sub_kernel, 2 ** max(0, i - 1))
            for i, sub_kernel in enumerate(self.sub_kernels.unbind(1))
        ]
        return torch.cat(pieces, dim=-1)

    def _kernel(self, length: int) -> Tensor:
        self._check_length(length)
        kernel = self._concatenated() / self.kernel_norm[:, None]
        return F.pad(kernel, (0, length - kernel.shape[1]))  # cuts, or adds zeros

    def _check_length(self, length: int) -> None:
        if length > self.length:
            raise ValueError(
                f"this SGConv layer was built for length={self.length}, and the input has {length}"
                " positions: build it for the longest input"
            )

    # ------------------------------------------------------------------------------ streaming

    def _skip_kernel(self, length: int) -> Tensor:
        """A stream asks ahead, for more entries than there are."""
        return super()._skip_kernel(min(length, self.length))

    def _read_chunk(
        self, u: Tensor, state: KernelState | None, lengths: Tensor | None
    ) -> tuple[Tensor, KernelState]:
        self._check_stream(state, u.shape[1])
        return super()._read_chunk(u, state, lengths)

    def _read_step(self, u: Tensor, state: KernelState) -> tuple[Tensor, KernelState]:
        self._check_stream(state, 1)
        return super()._read_step(u, state)

    def _check_stream(self, state: KernelState | None, more: int) -> None:
        """What was read and what comes; a restricted kernel forgets, and so never ends."""
        if self.kernel_length is None:
            self._check_length(more + (state.seen() if isinstance(state, OnlineState) else 0))


def upsample(values: Float[Tensor, "rows d"], factor: int) -> Float[Tensor, "rows {factor}*d"]:
    """Linear interpolation to `factor` times as many entries.

    Entry j lies at `(j + 1/2) / factor - 1/2` of the old ones, and the ends are continued as
    constants (what PyTorch calls `align_corners=False`). Plain sums and products: PyTorch's own
    has no deterministic backward on a GPU.
    """
    if factor == 1:
        return values
    place = torch.arange(factor, dtype=values.dtype, device=values.device)
    offset = (place + 0.5) / factor - 0.5  # from the nearest old entry, in (-1/2, 1/2)
    before = torch.cat((values[:, :1], values[:, :-1]), dim=1)[..., None]
    after = torch.cat((values[:, 1:], values[:, -1:]), dim=1)[..., None]
    near = values[..., None] * (1 - offset.abs())  # [rows, d, factor]
    return (near + before * F.relu(-offset) + after * F.relu(offset)).flatten(1)
