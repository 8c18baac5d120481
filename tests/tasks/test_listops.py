"""ListOps trees against exact probabilities and a slow evaluator of their text."""

import itertools
import math

import numpy as np
import pytest

from dlrnn.tasks import listops, numba_random
from dlrnn.tasks.listops import ListOpsGenerator, evaluate, generator, sub_values, to_text
from dlrnn.tasks.listops.text import CLOSE, OPERATOR, OPERATORS
from dlrnn.tasks.random import SPLITS, Random

EXAMPLE = "[MAX 2 6 [MED [SM 3 1 6 ] 8 3 ] 4 5 ]"
NANGIA = (
    "( ( ( ( ( ( [MAX 2 ) 6 ) ( ( ( ( [MED ( ( ( ( [SM 3 ) 1 ) 6 ) ] ) ) 8 ) 3 ) ] ) ) 4 ) 5 ) ] )"
)


def small(**settings):
    limits = {"max_depth": 3, "max_args": 3, "min_length": 0, "max_length": 1000}
    return ListOpsGenerator(**{**limits, **settings})


def draw(spec, count, split="train"):
    return [spec.draw(split, index) for index in range(count)]


# ---------------------------------------------------------------------------------- values


def parse(words):
    """The definition, recursively: a digit, or [name, children]."""
    word = words.pop(0)
    if word.isdigit():
        return int(word)
    children = []
    while words[0] != "]":
        children.append(parse(words))
    words.pop(0)
    return [word[1:], children]


def facts(tree):
    """Value and height of every operator as it is closed, then value and height of the tree."""
    if isinstance(tree, int):
        return [], tree, 0
    name, children = tree
    inner = [facts(child) for child in children]
    values = [value for _, value, _ in inner]
    height = 1 + max(height for _, _, height in inner)
    value = {
        "MIN": min(values),
        "MAX": max(values),
        "MED": int(np.median(values)),
        "SM": sum(values) % 10,
    }[name]
    return [*itertools.chain(*(own for own, _, _ in inner)), (name, value, height)], value, height


def specs():
    wide = small(max_depth=6, max_args=12, min_length=40, max_length=3000)
    return [small(), wide, listops.lra(), listops.subtrees()]


@pytest.mark.parametrize("spec", specs(), ids=lambda s: f"{s.name}-{s.max_depth}")
def test_values_heights_operators_and_positions(spec):
    for tree in draw(spec, 8 if spec.min_length > 1000 else 30, "validation"):
        assert spec.min_length < len(tree.tokens) < spec.max_length
        text = to_text(tree.tokens)
        assert np.array_equal(listops.from_text(text), tree.tokens)
        closed, value, height = facts(parse(text.split()))
        assert height < spec.max_depth
        names = [OPERATORS[token - OPERATOR] for token in tree.operators]
        assert list(zip(names, tree.values, tree.heights, strict=True)) == closed
        assert tree.positions.tolist() == np.flatnonzero(tree.tokens == CLOSE).tolist()
        assert evaluate(text) == value
        assert sub_values(text) == ([v for _, v, _ in closed] or [value])


def test_the_example_of_the_paper():
    assert sub_values(EXAMPLE) == sub_values(NANGIA) == [0, 3, 6]
    assert evaluate(EXAMPLE) == evaluate(NANGIA) == 6
    assert to_text(listops.from_text(NANGIA)) == EXAMPLE
    assert to_text(np.array([12, 3, 7, 15, 0, 0], dtype=np.uint8)) == "[MAX 2 6 ]"  # padded


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        ("[MED 1 4 ]", 2),  # 2.5, truncated
        ("[MED 9 1 4 ]", 4),
        ("[SM 9 9 9 ]", 7),
        ("[MIN 3 [MAX 1 2 ] ]", 2),
        ("( ( ( [MIN 3 ) ( ( ( [MAX 1 ) 2 ) ] ) ) ] )", 2),
    ],
)
def test_evaluate(text, value):
    assert evaluate(text) == value


@pytest.mark.parametrize(
    ("text", "keywords"),
    [
        ("", "empty"),
        ("[MAX 2 6", "not closed"),
        ("[MAX 2 6 ] 3", "after its end"),
        ("2 ]", "word 2 closes"),
        ("]", "word 1 closes"),
        ("[MAX ]", "MAX, which has no values"),
        ("[AVG 2 6 ]", "AVG"),
        ("[MAX 2 16 ]", "'16'"),
        ("( ( [MAX 2 ) 6 ] )", "parentheses"),
        ("( [MAX 2 ) 6 )", "not closed"),
        ("( [MAX ] )", "MAX, which has no values"),
        (")", "empty"),
        ("( ( [MAX ( [MIN 2 ) ) ] )", "not closed"),
        ("( ( [MAX 2 ) ]", "parentheses"),
        ("( ( [MAX 2 ) ] ) 5", "after its end"),
    ],
)
def test_malformed_expressions_are_refused(text, keywords):
    with pytest.raises(ValueError, match=keywords):
        evaluate(text)


# ---------------------------------------------------------------------------------- randomness


@pytest.mark.parametrize("seed", [0, 5, -1, 2**63])
@pytest.mark.parametrize(("split", "index", "attempt"), [("train", 0, 0), ("test", 70_000, 123)])
def test_numba_streams_equal_random(seed, split, index, attempt):
    stream = np.empty(4, dtype=np.uint64)
    place = np.uint64(SPLITS.index(split)), np.uint64(index), attempt
    numba_random.start(stream, np.uint64(seed % 2**64), *place)
    ours = [int(numba_random.bits(stream)) for _ in range(20)]
    random = Random(seed, split, attempt, first=index, count=1, device="cpu")
    assert ours == [int(bits) % 2**64 for bits in random.bits(20)[0]]


def test_a_tree_depends_on_seed_split_index_and_attempt():
    spec = listops.lra(seed=3)
    tree = spec.draw("test", 8)
    for again in (spec.draw("test", 8), spec.draw("test", 8, tree.attempt)):
        assert np.array_equal(again.tokens, tree.tokens)
        assert again.attempt == tree.attempt
    others = [
        spec.draw("test", 8, tree.attempt + 1),
        spec.draw("test", 9),
        spec.draw("train", 8),
        listops.lra(seed=4).draw("test", 8),
    ]
    assert len({other.template for other in (tree, *others)}) == 5
    assert others[0].attempt > tree.attempt


def test_templates_are_equal_where_expressions_differ_in_digits_only():
    hashes = {}
    for tree in draw(small(max_depth=4), 3000):
        template = "".join(c for c in to_text(tree.tokens) if not c.isdigit())
        hashes.setdefault(" ".join(template.split()), set()).add(tree.template)
    assert len(hashes) > 100
    assert all(len(one) == 1 for one in hashes.values())
    assert len(set.union(*hashes.values())) == len(hashes)


# ---------------------------------------------------------------------------------- statistics


def check_chi_square(observed, probability, sigmas=5):
    """Counts against probabilities; rare outcomes are pooled."""
    observed, expected = np.asarray(observed, float), np.asarray(probability) * np.sum(observed)
    assert math.isclose(expected.sum(), observed.sum(), rel_tol=1e-9)
    rare = expected < 10
    if rare.any():
        observed = np.append(observed[~rare], observed[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    keep = expected > 0
    assert observed[~keep].sum() == 0
    statistic = ((observed - expected)[keep] ** 2 / expected[keep]).sum()
    freedom = keep.sum() - 1
    # Wilson and Hilferty: the cube root of chi-square / freedom is nearly normal.
    normal = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / (
        2 / (9 * freedom)
    ) ** 0.5
    assert abs(normal) < sigmas, (statistic, freedom)


def shapes(depth, spec):
    """Every expression with `d` for a digit, and its probability, from the definition."""
    if depth >= spec.max_depth:
        return {"d": 1.0}
    children = shapes(depth + 1, spec)
    found = {"d": 0.75}
    for arity in range(2, spec.max_args + 1):
        for several in itertools.product(children.items(), repeat=arity):
            chance = 0.25 / (spec.max_args - 1) * math.prod(p for _, p in several) / 4
            for name in OPERATORS:
                found[f"[{name} {' '.join(text for text, _ in several)} ]"] = chance
    return found


@pytest.mark.parametrize(
    "spec",
    [
        small(max_args=2),
        small(),
        small(max_args=2, min_length=4, max_length=9),
        small(min_length=5, max_length=9),
        small(max_depth=2, max_args=4, min_length=1),
        small(max_depth=1),
    ],
    ids=lambda s: f"{s.max_depth}-{s.max_args}-{s.min_length}-{s.max_length}",
)
def test_every_tree_has_its_exact_probability(spec):
    chances = {
        text: chance
        for text, chance in shapes(1, spec).items()
        if spec.min_length < len(text.split()) < spec.max_length
    }
    names = {text: place for place, text in enumerate(chances)}
    counts = np.zeros(len(names))
    for tree in draw(spec, 20_000):
        text = to_text(tree.tokens)
        counts[names["".join("d" if c.isdigit() else c for c in text)]] += 1
    total = sum(chances.values())
    if len(chances) > 1:
        check_chi_square(counts, [chance / total for chance in chances.values()])
    else:
        assert counts.tolist() == [20_000]


def lengths(spec):
    """The probability of every length below max_length, from the definition."""
    size = spec.max_length
    digit = np.zeros(size)
    digit[1] = 1
    one = digit
    for _ in range(spec.max_depth - 1):
        spectrum = np.fft.rfft(one, 2 * size)
        power, below = one, 0.75 * digit
        for _ in range(2, spec.max_args + 1):
            power = np.fft.irfft(np.fft.rfft(power, 2 * size) * spectrum)[:size]
            below[2:] += 0.25 / (spec.max_args - 1) * power[:-2]
        one = below
    return one.clip(min=0)


@pytest.mark.parametrize("depth", [4, 8])
def test_lengths_have_their_exact_distribution(depth):
    spec = small(max_depth=depth, max_args=9, max_length=65_536)
    counts = np.bincount([len(tree.tokens) for tree in draw(spec, 20_000)], minlength=65_536)
    check_chi_square(counts, lengths(spec) / lengths(spec).sum())


@pytest.mark.parametrize("spec", [listops.subtrees(), listops.lra()], ids=lambda s: s.name)
def test_statistics_of_both_data_sets(spec):
    """Acceptance and lengths; operators, arities, digits and which nodes are operators."""
    trees = draw(spec, 1500)
    chances = lengths(spec)[spec.min_length + 1 :]
    accepted = chances.sum()
    mean = np.mean([tree.attempt for tree in trees])
    assert mean == pytest.approx((1 - accepted) / accepted, rel=5 / len(trees) ** 0.5)
    tokens = [len(tree.tokens) for tree in trees]
    edges = np.linspace(0, len(chances), 25, dtype=int)
    observed, _ = np.histogram(np.array(tokens) - spec.min_length - 1, edges)
    expected = [chances[a:b].sum() / accepted for a, b in itertools.pairwise(edges)]
    check_chi_square(observed, expected)
    counts = np.bincount(np.concatenate([tree.tokens for tree in trees]), minlength=16)
    check_chi_square(counts[1:11], [0.1] * 10)
    check_chi_square(counts[11:15], [0.25] * 4)
    assert counts[11:15].sum() == counts[CLOSE]
    # Given the length, the children of an operator are exchangeable: the first and the last one
    # are operators equally often.
    both = np.concatenate([tree.tokens for tree in trees])
    first = (both[1:] > 10) & (both[1:] < 15) & (both[:-1] > 10) & (both[:-1] < 15)
    last = (both[1:] == 15) & (both[:-1] == 15)
    assert abs(int(first.sum()) - int(last.sum())) < 5 * (first.sum() + last.sum()) ** 0.5


# ---------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("settings", "keywords"),
    [
        ({"max_depth": 0}, "max_depth .* not 0"),
        ({"max_args": 1}, "max_args .* not 1"),
        ({"min_length": -1}, "min_length .* not -1"),
        ({"max_length": 70_000}, "max_length .* not 70000"),
        ({"seed": True}, "seed .* not True"),
        ({"min_length": 7, "max_length": 8}, "no length lies between 7 and 8"),
    ],
)
def test_invalid_settings_are_refused(settings, keywords):
    with pytest.raises(ValueError, match=keywords):
        small(**settings)


def test_impossible_trees_are_refused(monkeypatch):
    monkeypatch.setattr(generator, "MAX_ATTEMPTS", 10_000)
    with pytest.raises(
        ValueError, match="no tree of depth 3 and at most 3 children with 500 < len"
    ):
        small(min_length=500).draw("train", 0)
    with pytest.raises(ValueError, match=r"split .* 'dev'"):
        small().draw("dev", 0)
