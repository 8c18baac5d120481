"""torch.compile, torch.export and DDP, each in a fresh interpreter without the shape checker."""

import shutil

import pytest
from support import DEVICE, run_python

PRELUDE = f"""
import torch
from dlrnn.nn import DLR, DSS, S4, S4D, GatedDLR, LocalAttention, SGConv, TapeDLR
torch.manual_seed(0)
device = torch.device({str(DEVICE)!r})
def close(a, b, tolerance=1e-5):
    error = ((a - b).norm() / b.norm().clamp(min=1e-30)).item()
    assert error <= tolerance, error
def agree(compiled, layer, x, **arguments):
    y, expected = compiled(x, **arguments), layer(x, **arguments)
    close(y, expected)
    grad, inputs = torch.randn_like(y), (x, *layer.parameters())
    have, want = (torch.autograd.grad(output, inputs, grad) for output in (y, expected))
    for a, b in zip(have, want):
        close(a, b)
"""

WHOLE_GRAPHS = """
def check(layer, *, steps=1, chunk=False):
    torch._dynamo.reset()
    layer = layer.to(device)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 50, layer.d_model, device=device, requires_grad=True)
    lengths = torch.tensor([50, 20], device=device)
    agree(compiled, layer, x)
    agree(compiled, layer, x, lengths=lengths)
    if layer.bidirectional:
        return
    y, state = compiled(x, return_state=True)
    expected, expected_state = layer(x, return_state=True)
    same(state, expected_state)
    step = torch.compile(layer.step, fullgraph=True, backend="aot_eager")
    for t in range(steps):
        y, state = step(x[:, t], state)
        expected, expected_state = layer.step(x[:, t], expected_state)
        close(y, expected)
        same(state, expected_state)
    if chunk:
        with torch.no_grad():
            _, state = layer(x[:, :25], return_state=True)
            y, state = compiled(x[:, 25:], state, return_state=True)
            close(y, layer(x)[:, 25:])

def same(state, expected):
    for a, b in zip(state, expected):
        if a.numel():
            close(a.double(), b.double())

for options in ({}, {"cast": "prod"}, {"bidirectional": True, "glu": True}, {"kernel_length": 9},
                {"real": True}, {"project": False}):
    check(DLR(4, 6, **options), steps=20)
check(DSS(4, 6))
check(GatedDLR(4, 6))
check(S4D(4, 6, bidirectional=True))
torch._dynamo.reset()
half = DLR(4, 6).to(device, torch.bfloat16)
x = torch.randn(2, 50, 4, device=device, dtype=torch.bfloat16)
close(torch.compile(half, fullgraph=True, backend="aot_eager")(x).float(), half(x).float())
check(S4(4, 6), chunk=True)
check(TapeDLR(4, 12, hold=2, gate=True, clock="own"), steps=3, chunk=True)
check(TapeDLR(4, 12, bidirectional=True))
for both_ways in (True, False):
    check(LocalAttention(8, chunk=7, bidirectional=both_ways))
print("ok")
"""


def test_whole_graphs_without_breaks():
    """Whole, padded, a chunk and a step."""
    assert "ok" in run_python(PRELUDE + WHOLE_GRAPHS)


MANY_LENGTHS = """
from torch._dynamo.testing import CompileCounterWithBackend

def check(layer, lengths, recompilations):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    layer = layer.to(device)
    compiled = torch.compile(layer, fullgraph=True, backend=counter, dynamic=True)
    counts = []  # the first length may call the backend twice: AOT autograd starts again
    for length in lengths:
        dtype = next(layer.parameters()).dtype
        x = torch.randn(2, length, layer.d_model, device=device, dtype=dtype, requires_grad=True)
        agree(compiled, layer, x)
        counts.append(counter.frame_count)
    assert counts[-1] - counts[0] <= recompilations, counts

check(DLR(4, 6), (30, 50, 200, 300, 777), 1)
check(S4(4, 6), (140, 200, 300), 0)  # on a GPU up to 128 positions are another graph
check(SGConv(4, length=80, d_kernel=8), (20, 33, 80), 0)
check(TapeDLR(4, 12, hold=2).double(), (30, 50, 200, 300), 0)  # gradients of angles are large
# the first and the last window are shorter
check(
    LocalAttention(8, heads=2, chunk=8, bidirectional=True),
    (9, 11, 13, 16, 17, 19, 20, 22, 24, 31, 40),
    2,
)
print("ok")
"""


def test_one_graph_serves_many_lengths():
    assert "ok" in run_python(PRELUDE + MANY_LENGTHS)


@pytest.mark.skipif(not shutil.which("c++"), reason="inductor needs a C++ compiler on this machine")
def test_inductor_gives_the_same_without_a_warning():
    code = """
import warnings
warnings.filterwarnings("error", message=".*complex.*")
layer = DLR(4, 6).to(device)
compiled = torch.compile(layer, fullgraph=True)
x = torch.randn(2, 50, 4, device=device)
y = compiled(x)
close(y, layer(x))
step = torch.compile(layer.step, fullgraph=True)
y, state = step(x[:, 0], layer.initial_state(2))
close(y, layer.step(x[:, 0])[0])
print("ok")
"""
    assert "ok" in run_python(PRELUDE + code)


def test_a_step_can_be_exported_saved_and_run(tmp_path):
    code = """
import sys
from dlrnn.nn import RecurrentState
class Step(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer
    def forward(self, x, *state):
        y, state = self.layer.step(x, RecurrentState(*state))
        return y, *state
layers = [DLR(4, 6, **options) for options in (
    {}, {"cast": "prod"}, {"glu": True}, {"kernel_length": 3}
)]
for layer in (*layers, DSS(4, 6), S4(4, 6)):
    layer = layer.to(device).eval()
    x, state = torch.randn(3, 4, device=device), layer.initial_state(3)
    program = torch.export.export(Step(layer), (x, *state))
    assert not [n for n in program.graph.nodes if "dlrnn" in str(n.target)], "plain PyTorch alone"
    torch.export.save(program, sys.argv[1])
    loaded = torch.export.load(sys.argv[1]).module()
    mine = state
    for _ in range(5):
        x = torch.randn(3, 4, device=device)
        y, *state = loaded(x, *state)
        expected, mine = layer.step(x, mine)
        close(y, expected, 1e-6)
print("ok")
"""
    assert "ok" in run_python(PRELUDE + code, str(tmp_path / "step.pt2"))


def test_ddp_with_two_processes_is_one_on_the_whole_batch(tmp_path):
    code = """
import torch.multiprocessing as mp, torch.distributed as dist, sys
from torch.nn.parallel import DistributedDataParallel

def data():
    torch.manual_seed(1)
    return DLR(4, 6), torch.randn(4, 20, 4), torch.randn(4, 20, 4)

def work(rank):
    dist.init_process_group("gloo", f"file://{sys.argv[1]}", rank=rank, world_size=2)
    layer, x, target = data()
    model, mine = DistributedDataParallel(layer), slice(2 * rank, 2 * rank + 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        (model(x[mine]) - target[mine]).square().mean().backward()
        optimizer.step()
    alone, x, target = data()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        (alone(x) - target).square().mean().backward()
        optimizer.step()
    for a, b in zip(layer.parameters(), alone.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    dist.destroy_process_group()

context = mp.get_context("fork")
processes = [context.Process(target=work, args=(rank,)) for rank in range(2)]
[p.start() for p in processes]
[p.join() for p in processes]
assert [p.exitcode for p in processes] == [0, 0]
print("ok")
"""
    assert "ok" in run_python(
        PRELUDE.replace(f"{str(DEVICE)!r}", "'cpu'") + code, str(tmp_path / "met")
    )


COMPILED = """
import torch
from torch import nn
from torch.autograd import forward_ad
from dlrnn.nn import DLR, Experts, reuse_kernels

experts, x = Experts(4, 3, 5), torch.randn(2, 9, 4)
compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
print(torch.allclose(compiled(x), experts(x), atol=1e-5))


class Steps(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = DLR(4, 6)

    def forward(self, x):
        return self.layer.step(x, self.layer.initial_state(x.shape[0]))[0]


step, x = Steps(), torch.randn(7, 4)
sizes = {"x": {0: torch.export.Dim("B", min=2)}}
made = torch.export.export(step, (x[:3],), dynamic_shapes=sizes, strict=False)
print(torch.allclose(made.module()(x), step(x), atol=1e-6))

layer, x = DLR(3, 4), torch.randn(1, 5, 3)
compiled = torch.compile(layer, backend="aot_eager")
with reuse_kernels(layer):
    late = compiled(x).sum()
try:
    late.backward()
except ValueError as error:
    print(all(word in str(error) for word in ("backward()", "inside")))

layer = DLR(4, 6).requires_grad_(False)
compiled, x = torch.compile(layer, backend="aot_eager"), torch.randn(1, 5, 4)
y = compiled(x)
try:
    with forward_ad.dual_level():
        compiled(forward_ad.make_dual(x, x))
except Exception as error:
    print("forward-mode AD" in str(error))
print(torch.allclose(compiled(x), y))
"""


def test_compiled_experts_steps_and_kernel_reuse():
    assert run_python(COMPILED).splitlines() == [
        "True",  # experts are one graph
        "True",  # a step, exported for any batch
        "True",  # a late backward() is refused
        "True",  # forward mode is refused there too
        "True",
    ]
