"""What LocalAttention has beyond Attention: chunks, and memory that does not grow with them."""

import pytest
import torch
from support import DEVICE, assert_close
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dlrnn.nn import Attention, LocalAttention


def make(**options):
    return LocalAttention(8, **{"heads": 2, "chunk": 5, **options}).to(DEVICE).double()


def random(*shape):
    return torch.randn(*shape, dtype=torch.float64, device=DEVICE)


@pytest.mark.parametrize("length", [1, 4, 5, 6, 9, 10, 11, 23, 25])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_a_position_sees_its_chunk_and_the_neighbours(length, bidirectional):
    """Exactly those outputs change that may, for a change of each input."""
    layer, x = make(bidirectional=bidirectional), random(1, length, 8)
    y = layer(x)
    for s in range(length):
        other = x.clone()
        other[:, s] += 1
        changed = (layer(other) - y).abs().amax(dim=(0, 2)) > 1e-9
        for t in range(length):
            near = t // 5 - s // 5 in ((-1, 0, 1) if bidirectional else (0, 1))
            assert changed[t] == (near and (bidirectional or s <= t)), (s, t)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_a_single_chunk_equals_attention(bidirectional):
    """Also over two chunks, which see each other."""
    layer = make(bidirectional=bidirectional, chunk=12)
    whole = Attention(8, heads=2, bidirectional=bidirectional).to(DEVICE).double()
    whole.load_state_dict(layer.state_dict())
    for length in (1, 11, 12, 13, 24):
        x = random(2, length, 8)
        assert_close(layer(x), whole(x), 1e-12)


def test_a_state_has_the_size_of_two_chunks():
    layer = make()
    with torch.no_grad():
        for length in (1, 7, 1000):
            _, state = layer(random(3, length, 8), return_state=True)
            _, state = layer.step(random(3, 8), state)
            assert state.keys.shape == state.values.shape == (3, 10, 8)
            held = sum(t.untyped_storage().nbytes() for t in state)
            assert held == (2 * 3 * 10 * 8 + 3) * 8
            assert state.seen.tolist() == [length + 1] * 3


class Largest(TorchDispatchMode):
    """The numbers in the largest tensor that is made, each as often as it is in memory."""

    def __init__(self):
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                numbers = tensor.untyped_storage().nbytes() // tensor.element_size()
                self.numbers = max(self.numbers, numbers)
        return result


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("how", ["whole", "padded", "streamed"])
def test_memory_is_linear_in_the_length(bidirectional, how):
    """The largest tensor with every score written down, forward and backward."""
    if bidirectional and how == "streamed":
        return
    layer = make(chunk=16, bidirectional=bidirectional)
    largest = []
    for length in (1000, 4000):
        x = random(1, length, 8).requires_grad_()
        arguments = {"whole": {}, "padded": {"lengths": torch.tensor([length - 3], device=DEVICE)}}
        arguments["streamed"] = {"state": None if bidirectional else layer.initial_state(1)}
        with sdpa_kernel(SDPBackend.MATH), Largest() as seen:
            layer(x, **arguments[how]).sum().backward()
        largest.append(seen.numbers)
    scores = 3 if bidirectional or how == "streamed" else 2 * 2  # a position is in two windows
    assert largest[1] <= 2 * scores * 16 * (4000 + 16)  # heads, scores of a position, positions
    assert largest[1] <= 4.5 * largest[0]
