"""The targets of the atomic tasks against slow definitions that are computed from the input."""

import math

import pytest
import torch
from support import DEVICE, run_python

from dlrnn import tasks
from dlrnn.bench.measure import peak_bytes
from dlrnn.tasks.atomic import ATOMIC
from dlrnn.tasks.atomic.operations import largest_product, product_of_reflections

NAMES = [task.name for task in ATOMIC]
LENGTHS = {"shift": (8, 16, 256), "context-shift": (3, 4, 50), "solve": (3, 8, 50, 512)}
LENGTHS["solve-fixed"] = LENGTHS["solve"]


def cases():
    return [(name, length) for name in NAMES for length in LENGTHS.get(name, (1, 2, 33, 100))]


def shift(x, task):
    L = task.length
    return [[x[i - j * L // 8] if i - j * L // 8 >= 0 else 0.0 for j in range(8)] for i in range(L)]


def cumsum(x, task):
    return [[sum(x[: i + 1]) / math.sqrt(i + 1)] for i in range(task.length)]


def cummax(x, task):
    return [[max(x[: i + 1])] for i in range(task.length)]


def reverse(x, task):
    assert all(v == 0 for v in x[task.length :])
    return [[x[task.length - 1 - i]] for i in range(task.length)]


def sort(x, task):
    assert all(v == 0 for v in x[task.length :])
    return [[v] for v in sorted(x[: task.length], key=lambda v: abs(v - x[0]))]


def context_shift(x, task):
    L = task.length
    shift = round(math.atan2(x[1], x[0]) % (2 * math.pi) / (2 * math.pi) * L)
    assert 0 <= shift <= L - 2
    return [[x[i - shift] if i >= shift else 0.0] for i in range(L)]


SLOW = {
    **{"shift": shift, "cumsum": cumsum, "cummax": cummax, "reverse": reverse, "sort": sort},
    "context-shift": context_shift,
}


@pytest.mark.parametrize(("name", "length"), cases())
def test_targets_match_the_definition(name, length):
    task = tasks.get(name, length=length)
    inputs, targets, _ = task.sample(3, step=5, device=DEVICE)
    assert inputs.shape == (3, task.input_length, task.d_input)
    assert targets.shape == (3, task.output_length, task.d_output)
    assert inputs.dtype == targets.dtype == torch.float32
    inputs, targets = inputs.cpu(), targets.cpu()
    check_positions(inputs, task)
    for sample, target in zip(inputs.double(), targets.double(), strict=True):
        if name in SLOW:
            x = sample[:, 0].tolist()
            assert max(map(abs, x[2:] if name == "context-shift" else x)) == 1
            expected = torch.tensor(SLOW[name](x, task), dtype=torch.float64)
            torch.testing.assert_close(target, expected, rtol=0, atol=1e-6)
        elif name.startswith("select"):
            check_select(sample, target, task)
        elif name.startswith("solve"):
            check_solve(sample, target, task)
        else:
            check_mips(sample, target, task)


def check_positions(inputs, task):
    T = task.input_length
    for i in {0, T // 3, T - 1}:
        expected = torch.tensor([math.cos(2 * math.pi * i / T), math.sin(2 * math.pi * i / T)])
        torch.testing.assert_close(inputs[:, i, -2:], expected.expand(3, 2), rtol=0, atol=1e-6)


def check_select(sample, target, task):
    x, marks = sample[:, 0].tolist(), sample[:, 1].tolist()
    assert len(x) == task.length + 64
    assert max(map(abs, x)) == 1
    assert sorted(set(marks)) in ([0, 1], [1])
    assert sum(marks) == 32
    assert x[-32:] == marks[-32:] == [0] * 32
    chosen = [value for value, mark in zip(x, marks, strict=True) if mark]
    assert target[:, 0].tolist() == chosen


def check_solve(sample, target, task):
    N = max(n for n in range(task.length) if task.length - n * n - n >= n)
    assert task.output_length == N
    x = sample[:, 0]
    rows = x[: N * N + N].view(N, N + 1)
    A, B, X = rows[:, :N], rows[:, N], target[:, 0]
    assert (x[N * N + N :] == 0).all()
    torch.testing.assert_close(A @ A.T, torch.eye(N, dtype=torch.float64), rtol=0, atol=1e-6)
    torch.testing.assert_close(A @ X, B, rtol=0, atol=1e-6)
    torch.testing.assert_close(X.norm(), torch.ones((), dtype=torch.float64))


def check_mips(sample, target, task):
    query, key, value = sample[:, :12].view(task.length, 3, 4).unbind(1)
    for part in (query, key, value):
        torch.testing.assert_close(part.norm(dim=1), torch.ones(task.length, dtype=torch.float64))
    for i in range(task.length):
        products = [float(query[i] @ key[j]) for j in range(i + 1)]
        best = max(products)
        near = [j for j, product in enumerate(products) if product > best - 1e-6]  # fp32 ties
        assert any(torch.equal(target[i], value[j]) for j in near)


# ---------------------------------------------------------------------------------- batches


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_depends_on_its_arguments_alone(name):
    task = tasks.get(name, length=64)
    whole = task.sample(6, split="test", step=3, device=DEVICE)
    again = tasks.get(name, length=64).sample(6, split="test", step=3, device=DEVICE)
    parts = [
        task.sample(n, split="test", step=3, device=DEVICE, first=f) for f, n in ((0, 2), (2, 4))
    ]
    for a, b, c, d in list(zip(whole, again, *parts, strict=True))[:2]:
        assert torch.equal(a, b)
        torch.testing.assert_close(a, torch.cat((c, d)), rtol=0, atol=1e-6)
    for other in (
        task.sample(6, split="train", step=3, device=DEVICE),
        task.sample(6, split="test", step=4, device=DEVICE),
        tasks.get(name, length=64, seed=1).sample(6, split="test", step=3, device=DEVICE),
    ):
        assert not torch.equal(other.targets, whole.targets)
    elsewhere = task.sample(6, split="test", step=3, device="cpu")
    torch.testing.assert_close(whole.inputs.cpu(), elsewhere.inputs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["select-fixed", "solve-fixed"])
def test_fixed_variants_depend_on_the_seed_alone(name):
    task, other = tasks.get(name, length=99), tasks.get(name, length=99, seed=1)
    feature = 1 if name == "select-fixed" else 0
    kept = slice(None) if name == "select-fixed" else slice(0, 9)  # the first row of A

    def fixed(task, step, split="train"):
        return task.sample(4, step=step, split=split).inputs[:, kept, feature]

    first = fixed(task, 0)
    assert len(task.constants) == 1
    assert task == tasks.get(name, length=99)
    assert (first == first[0]).all()
    assert torch.equal(first, fixed(task, 9, "test"))
    assert not torch.equal(first, fixed(other, 0))
    varying = tasks.get(name.removesuffix("-fixed"), length=99)
    assert not (fixed(varying, 0) == fixed(varying, 0)[0]).all()


def test_marked_positions_are_uniform():
    """Each of L + M positions is marked with probability M / (L + M)."""
    marks = tasks.get("select", length=32).sample(4000).inputs[:, :64, 1]
    share, error = marks.mean(0), (0.25 / 4000) ** 0.5
    assert (share - 0.5).abs().max() < 5 * error


def test_context_shifts_are_uniform():
    inputs = tasks.get("context-shift", length=6).sample(5000).inputs
    angle = torch.atan2(inputs[:, 1, 0], inputs[:, 0, 0]) % (2 * math.pi)
    counts = torch.bincount((angle / (2 * math.pi) * 6).round().long(), minlength=6)
    assert counts[5] == 0  # 0 .. L-2
    assert (counts[:5] - 1000).abs().max() < 5 * 1000**0.5


def test_orthonormal_matrices_are_uniform():
    """The trace of a uniform orthonormal matrix has mean 0 and variance 1, an entry the fourth
    moment 3 / (N (N + 2)), the determinant both signs.
    """
    task = tasks.get("solve", length=24)  # N = 4
    rows = task.sample(5000).inputs[:, :20, 0].view(-1, 4, 5)[..., :4]
    trace = rows.diagonal(dim1=1, dim2=2).sum(-1)
    assert abs(trace.mean()) < 5 / 5000**0.5
    assert trace.var().item() == pytest.approx(1, abs=5 * (2 / 5000) ** 0.5)
    torch.testing.assert_close((rows**4).mean(0), torch.full((4, 4), 1 / 8), rtol=0, atol=0.015)
    assert abs(torch.linalg.det(rows).mean()) < 5 / 5000**0.5


def test_mips_needs_little_memory():
    task = tasks.get("mips")
    peak = peak_bytes(lambda: task.sample(4, device=DEVICE), DEVICE)
    assert peak < 256 * 2**20


# ---------------------------------------------------------------------------------- scores


def test_r2_matches_the_definition():
    task = tasks.get("cumsum", length=10)
    batch = task.sample(4)
    output = torch.randn(4, 10, 1)
    y, p = batch.targets.double(), output.double()
    expected = 1 - ((p - y) ** 2).mean() / ((y - y.mean()) ** 2).mean()
    have = task.metrics(output, batch)["R2"]
    torch.testing.assert_close(have.double(), expected, rtol=1e-5, atol=1e-6)
    assert task.metrics(batch.targets, batch)["R2"] == 1
    constant = batch._replace(targets=torch.ones(4, 10, 1))
    assert task.metrics(torch.zeros(4, 10, 1), constant)["R2"] == pytest.approx(1 - 1e5)


def test_the_last_positions_are_the_prediction():
    task = tasks.get("reverse", length=5)
    batch = task.sample(2)
    output = torch.cat((torch.full((2, 5, 1), 99.0), batch.targets), dim=1)
    assert task.loss(output, batch) == 0
    assert task.metrics(output, batch)["R2"] == 1


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("length", [8, 64, 1024])
def test_previews_have_the_definition_as_caption(name, length, tmp_path):
    task = tasks.get(name, length=length)
    figure = task.preview()
    figure.savefig(tmp_path / "preview.png")
    assert figure.get_supxlabel().replace("\n", " ") == task.definition
    assert figure.get_suptitle() == name


@pytest.mark.parametrize("name", NAMES)
def test_batches_do_not_depend_on_the_default_dtype(name):
    batch = tasks.get(name).sample(1)
    torch.set_default_dtype(torch.float64)
    try:
        again = tasks.get(name).sample(1)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(batch.inputs, again.inputs)
    assert torch.equal(batch.targets, again.targets)


# ---------------------------------------------------------------------------------- kernels

INTERPRETED = """
import os
os.environ["TRITON_INTERPRET"] = "1"
import torch
from dlrnn.tasks.atomic import triton_kernels
from dlrnn.tasks.atomic.operations import largest_product, product_of_reflections

torch.manual_seed(0)
for shape in [(1, 1, 1), (3, 33, 2), (2, 130, 4), (1, 300, 5), (1, 1030, 3)]:
    query, key = torch.randn(2, *shape)
    assert torch.equal(triton_kernels.largest_product(query, key), largest_product(query, key))
for shape in [(1, 1, 1), (2, 5, 5), (3, 7, 20), (1, 31, 31)]:
    vectors = torch.nn.functional.normalize(torch.randn(shape, dtype=torch.float64), dim=-1)
    have, want = triton_kernels.product_of_reflections(vectors), product_of_reflections(vectors)
    torch.testing.assert_close(have, want, rtol=0, atol=1e-13)
print("right")
"""


def test_triton_kernels_match_the_cpu():
    pytest.importorskip("triton")
    assert run_python(INTERPRETED).strip() == "right"


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 4), (3, 256, 4), (2, 257, 3), (2, 700, 4)])
def test_largest_product_matches_the_definition(shape):
    query, key = torch.randn(2, *shape, device=DEVICE)
    later = torch.ones(shape[1], shape[1], device=DEVICE).triu(1).bool()
    expected = (query.double() @ key.double().mT).masked_fill(later, -math.inf).argmax(-1)
    assert torch.equal(largest_product(query, key), expected)


def test_largest_product_of_nan_is_position_zero():
    nan = torch.full((2, 300, 3), math.nan)
    torch.use_deterministic_algorithms(True)  # fills uninitialised memory
    try:
        assert torch.equal(largest_product(nan, nan), torch.zeros(2, 300).long())
    finally:
        torch.use_deterministic_algorithms(False)


def test_product_of_reflections_matches_the_definition():
    vectors = torch.randn(3, 9, 20, dtype=torch.float64, device=DEVICE)
    vectors = torch.nn.functional.normalize(vectors, dim=-1)
    expected = eye = torch.eye(20, dtype=torch.float64, device=DEVICE)
    for v in vectors.unbind(1):
        expected = expected @ (eye - 2 * v[:, :, None] * v[:, None, :])
    torch.testing.assert_close(product_of_reflections(vectors), expected, rtol=0, atol=1e-13)
