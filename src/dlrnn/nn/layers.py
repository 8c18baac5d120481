"""PyTorch's LayerNorm and linear map with fused kernels on a GPU; their state_dict is PyTorch's."""

from torch import Tensor, nn

from dlrnn import ops


class SumNorm(nn.LayerNorm):
    """nn.LayerNorm over the channels, of x or of `x + added`."""

    def __init__(self, d_model: int) -> None:
        super().__init__(d_model)

    def forward(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        """[..., H] to [..., H]."""
        return ops.layer_norm(x, self.weight, self.bias, eps=self.eps, added=added)


class ThinLinear(nn.Linear):
    """nn.Linear, fast where one side has only a few numbers: encoders and decoders."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] to [..., O]."""
        return ops.linear(x, self.weight, self.bias)
