"""What attention has beside the contract: positions, PyTorch's kernels, chunks and their memory."""

import pytest
import torch
from mixers import EVERY
from support import DEVICE, assert_close
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dlrnn import ops
from dlrnn.nn import Attention, LocalAttention

both_ways = pytest.mark.parametrize("bidirectional", [False, True])


def local(chunk=5, **options):
    return LocalAttention(8, heads=2, chunk=chunk, **options).to(DEVICE).double()


def random(*shape):
    return torch.randn(*shape, dtype=torch.float64, device=DEVICE)


def test_scores_depend_on_differences_of_positions_alone():
    """Also far away: an angle in fp32 would be wrong there."""
    q, k = random(2, 1, 1, 3, 4).float()

    def score(a, b):
        a, b = (torch.tensor([[position]], device=DEVICE) for position in (a, b))
        return (ops.rotate(q, a) * ops.rotate(k, b)).sum(-1)

    assert_close(score(2**20 + 17, 2**20 + 4), score(13, 0), 1e-6)
    assert_close(score(5, 5), (q * k).sum(-1), 1e-6)


@pytest.mark.parametrize(
    "form", [form for form in EVERY if issubclass(form.kind, Attention)], ids=str
)
def test_pytorchs_fused_kernel_serves_every_form(form, monkeypatch):
    """Where the last dimension lies apart in memory, PyTorch writes down every score."""
    plain = F.scaled_dot_product_attention

    def checked(q, k, v, **more):
        assert all(t.stride(-1) == 1 for t in (q, k, v))
        return plain(q, k, v, **more)

    monkeypatch.setattr(F, "scaled_dot_product_attention", checked)
    layer, x = form.make(torch.float32), form.input(30, dtype=torch.float32)
    lengths = torch.tensor([30, 7], device=DEVICE)
    fused = SDPBackend.FLASH_ATTENTION if DEVICE.type == "cpu" else SDPBackend.EFFICIENT_ATTENTION
    with sdpa_kernel(fused):
        layer(x, lengths=lengths).sum().backward()
        if not layer.bidirectional:
            _, state = layer(x, return_state=True, lengths=lengths)
            layer.step(x[:, 0], state)
            layer(x, state).sum().backward()


# ---------------------------------------------------------------------------------- chunks


@pytest.mark.parametrize("length", [1, 4, 5, 6, 9, 10, 11, 23, 25])
@both_ways
def test_a_position_sees_its_chunk_and_the_neighbours(length, bidirectional):
    """Exactly those outputs change that may, for a change of each input."""
    layer, x = local(bidirectional=bidirectional), random(1, length, 8)
    y = layer(x)
    for s in range(length):
        other = x.clone()
        other[:, s] += 1
        changed = (layer(other) - y).abs().amax(dim=(0, 2)) > 1e-9
        for t in range(length):
            near = t // 5 - s // 5 in ((-1, 0, 1) if bidirectional else (0, 1))
            assert changed[t] == (near and (bidirectional or s <= t)), (s, t)


@both_ways
def test_a_single_chunk_equals_attention(bidirectional):
    """Also over two chunks, which see each other."""
    layer = local(12, bidirectional=bidirectional)
    whole = Attention(8, heads=2, bidirectional=bidirectional).to(DEVICE).double()
    whole.load_state_dict(layer.state_dict())
    for length in (1, 11, 12, 13, 24):
        x = random(2, length, 8)
        assert_close(layer(x), whole(x), 1e-12)


def test_a_state_has_the_size_of_two_chunks():
    layer = local()
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

    numbers = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                numbers = tensor.untyped_storage().nbytes() // tensor.element_size()
                self.numbers = max(self.numbers, numbers)
        return result


@pytest.mark.parametrize(
    ("how", "bidirectional"),
    [("whole", False), ("whole", True), ("padded", False), ("padded", True), ("streamed", False)],
)
def test_memory_is_linear_in_the_length(how, bidirectional):
    """The largest tensor with every score written down, forward and backward."""
    layer = local(16, bidirectional=bidirectional)
    largest = []
    for length in (1000, 4000):
        x, more = random(1, length, 8).requires_grad_(), {}
        if how == "padded":
            more = {"lengths": torch.tensor([length - 3], device=DEVICE)}
        elif how == "streamed":
            more = {"state": layer.initial_state(1)}
        with sdpa_kernel(SDPBackend.MATH), Largest() as seen:
            layer(x, **more).sum().backward()
        largest.append(seen.numbers)
    scores = 3 if bidirectional or how == "streamed" else 2 * 2  # a position is in two windows
    assert largest[1] <= 2 * scores * 16 * (4000 + 16)  # heads, scores of a position, positions
    assert largest[1] <= 4.5 * largest[0]
