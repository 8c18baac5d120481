import pytest
import torch
from support import DEVICE

from dlrnn.tasks.random import GOLDEN, SPLITS, Random, mix, signed


def draw(seed=0, split="train", step=0, first=0, count=4):
    return Random(seed, split, step, first=first, count=count, device=DEVICE)


def splitmix64(state: int):
    """The published algorithm, on Python's integers."""
    mask = 2**64 - 1
    while True:
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        yield z ^ (z >> 31)


def test_bits_are_those_of_splitmix64():
    expected = splitmix64(1234567)
    first = [next(expected) for _ in range(3)]
    assert first == [6457827717110365317, 3203168211198807973, 9817491932198370423]  # published
    counter = torch.arange(1, 4, device=DEVICE)
    bits = mix(1234567 + counter * signed(GOLDEN))
    assert [int(b) % 2**64 for b in bits] == first
    key = mix(mix(torch.tensor(5)) ^ SPLITS.index("train"))
    key = mix(mix(key ^ 3) + torch.tensor(2) * signed(GOLDEN))  # of sample 2
    expected = splitmix64(int(key) % 2**64)
    found = draw(seed=5, step=3).bits(6)[2]
    assert [int(b) % 2**64 for b in found] == [next(expected) for _ in range(6)]


def test_a_sample_is_a_function_of_its_index_alone():
    whole = draw(count=8).normal(3, 5)
    parts = draw(count=3).normal(3, 5), draw(first=3, count=5).normal(3, 5)
    assert torch.equal(whole, torch.cat(parts))
    here = Random(0, "train", 0, first=0, count=8, device="cpu")
    torch.testing.assert_close(whole.cpu(), here.normal(3, 5), rtol=1e-12, atol=1e-12)


def test_seed_split_step_and_index_change_the_bits():
    base = draw().bits(20)
    changes = [{"seed": seed} for seed in (1, -1, 2**63)]
    changes += [{"split": "validation"}, {"split": "test"}, {"step": 1}, {"first": 1}]
    for change in changes:
        assert not (draw(**change).bits(20) == base).any()


def test_a_step_may_be_a_tensor():
    step = torch.tensor(7, device=DEVICE)
    assert torch.equal(draw(step=step).bits(5), draw(step=7).bits(5))


def test_later_calls_draw_new_bits():
    random = draw()
    assert not (random.bits(10) == random.bits(10)).any()


@pytest.mark.parametrize("name", ["uniform", "normal"])
def test_moments(name):
    """Mean, variance and correlations of a million numbers, within five standard errors."""
    x = getattr(draw(count=1000), name)(1000)
    mean, variance = (0.5, 1 / 12) if name == "uniform" else (0.0, 1.0)
    assert abs(x.mean() - mean) < 5 * (variance / 1e6) ** 0.5
    assert x.var().item() == pytest.approx(variance, rel=5 * (2 / 1e6) ** 0.5)
    centred = (x - mean) / variance**0.5
    neighbours = centred[:, 1:] * centred[:, :-1], centred[1:] * centred[:-1]
    box_muller_pairs = centred[:, :500] * centred[:, 500:]
    for product in (*neighbours, box_muller_pairs):
        assert abs(product.mean()) < 5 / product.numel() ** 0.5
    if name == "normal":
        assert (centred**4).mean().item() == pytest.approx(3, abs=5 * (96 / 1e6) ** 0.5)
    else:
        assert x.min() >= 0
        assert x.max() < 1


def test_integers_cover_their_range_evenly():
    counts = torch.bincount(draw(count=10).integer(7, 10000).flatten(), minlength=7)
    assert len(counts) == 7
    assert (counts - 1e5 / 7).abs().max() < 5 * (1e5 / 7) ** 0.5
