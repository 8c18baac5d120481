"""The whole layer as one op, and the replay of launches, on emulated kernels and on a GPU."""

import pytest
import torch
from support import DEVICE, relative_error, run_python
from torch._subclasses.fake_tensor import FakeTensorMode

from dlrnn import DLR, ops
from dlrnn.ops.cuda import convolution, nvrtc, output_stage, vandermonde
from dlrnn.ops.cuda.replay import ATTEMPTS, Replayed
from dlrnn.ops.dlr_layer import composition, layer_backward_op, layer_op, longest

SIZES = [(2, 150, 16, 5, 150, False), (1, 260, 32, 33, 100, True)]  # B, L, H, N, entries, two-sided


def layer(sizes, device="cpu"):
    """u, the parameters and dout of a small layer."""
    batch, length, channels, states, _, both = sizes
    rows = 2 * channels if both else channels
    shapes = (states,), (states,), (rows, states, 2), (channels,), (channels, channels), (channels,)
    u = torch.randn(batch, length, channels, device=device)
    parameters = [torch.randn(shape, device=device) for shape in shapes]
    parameters[0].mul_(0.1)  # |lambda| near 1
    parameters[2].div_(states)
    return u, tuple(parameters), torch.randn(batch, length, channels, device=device)


def expected(u, parameters, dout, entries, activation):
    """Output and gradients of the composition, in float64 on a CPU."""
    inputs = [x.double().cpu().requires_grad_() for x in (u, *parameters)]
    out = composition(inputs[0], tuple(inputs[1:]), entries, activation)
    return out, torch.autograd.grad(out, inputs, dout.double().cpu())


@pytest.mark.parametrize("sizes", SIZES)
def test_the_launches_compute_the_composition(emulated, sizes):
    """Three times: the second call is recorded, the third one replayed at other addresses."""
    for _ in range(3):
        u, parameters, dout = layer(sizes)
        want, gradients = expected(u, parameters, dout, sizes[4], "gelu")
        out, *kept = layer_op(u, *parameters, sizes[4], "gelu", torch.float32, False)
        log_lambda_re, _, W, D, weight, _ = parameters
        have = layer_backward_op(dout, *kept, log_lambda_re, W, D, weight, "gelu", torch.float32)
        assert relative_error(out, want) < 1e-6
        for mine, other in zip(have, gradients, strict=True):
            assert relative_error(mine, other) < 2e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_custom_ops_are_sound(emulated, dtype):
    u, parameters, dout = layer((2, 152, *SIZES[0][2:]))  # rows have no padding: it is not written
    options = 150, "gelu", dtype, False
    for x in (u, *parameters):
        x.requires_grad_()
    torch.library.opcheck(torch.ops.dlrnn.dlr_layer.default, (u, *parameters, *options))
    with torch.no_grad():
        kept = layer_op(u, *parameters, *options)[1:]
    log_lambda_re, _, W, D, weight, _ = (x.detach() for x in parameters)
    given = dout.to(dtype), *kept, log_lambda_re, W, D, weight, "gelu", torch.float32
    torch.library.opcheck(torch.ops.dlrnn.dlr_layer_backward.default, given)


@pytest.mark.parametrize(
    ("device", "missing"),  # a device of its own for each, because the answer is kept
    [(100, None), (101, convolution), (102, output_stage), (103, vandermonde)],
)
@pytest.mark.skipif(DEVICE.type == "cuda", reason="pretends to have GPUs")
def test_the_longest_sequence_depends_on_all_three_families(device, missing, monkeypatch):
    monkeypatch.setattr(nvrtc, "capability", lambda _: (9, 0))
    monkeypatch.setattr(nvrtc, "available", lambda: True)
    monkeypatch.setattr(nvrtc, "shared_memory_bytes", lambda _: nvrtc.SHARED_MEMORY[9, 0])
    if missing is not None:
        monkeypatch.setattr(missing, "supports", lambda *_: False)
    with FakeTensorMode():
        assert longest(device) == (16384 if missing is None else 0)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"bidirectional": True, "kernel_length": 90, "glu": True}])
def test_an_eager_layer_equals_the_composition(options):
    """Replayed calls too, with first and second derivatives."""
    one = DLR(32, 24, **options).to(DEVICE)
    for _ in range(4):
        x = torch.randn(2, 300, 32, device=DEVICE, requires_grad=True)
        inputs, g = (x, *one.parameters()), torch.randn(2, 300, 32, device=DEVICE)
        with ops.dispatch.recorded():  # runs the composition
            want = one(x)
        have = one(x)
        assert options or "Eager" in str(have.grad_fn)
        assert relative_error(have, want) < 1e-6
        for create_graph in (False, True):
            wanted = torch.autograd.grad(want, inputs, g, create_graph=True)
            found = torch.autograd.grad(
                have, inputs, g, create_graph=create_graph, retain_graph=True
            )
            for mine, other in zip(found, wanted, strict=True):
                assert relative_error(mine, other) < 1e-5
        mine, other = (
            torch.autograd.grad(sum((y**2).sum() for y in many), inputs, allow_unused=True)
            for many in (found, wanted)
        )
        for a, b in zip(mine, other, strict=True):
            assert (a is None) == (b is None)
            assert a is None or relative_error(a, b) < 1e-4


@pytest.mark.gpu
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("length", [300, 5000])
def test_autocast_equals_the_composition(half, length):
    """The same kernels: the same bits, with u in fp32 and in 16 bits; second derivatives exist."""
    one = DLR(32, 24, glu=True).to(DEVICE)
    for given in (torch.float32, half):
        for _ in range(3):
            x = torch.randn(2, length, 32, device=DEVICE).to(given).requires_grad_()
            inputs, g = (x, *one.parameters()), torch.randn(2, length, 32, device=DEVICE).to(half)
            with torch.autocast("cuda", half):
                have = one(x)
                with ops.dispatch.recorded():
                    want = one(x)
            assert have.dtype == half
            assert torch.equal(have, want)
            found = torch.autograd.grad(have, inputs, g, create_graph=True)
            wanted = torch.autograd.grad(want, inputs, g)
            for mine, other in zip(found, wanted, strict=True):
                assert mine.dtype == other.dtype
                assert relative_error(mine, other) < 2e-2
            torch.autograd.grad(found[0].float().square().sum(), inputs[1:])
            with torch.autocast("cuda", half):
                again = one(x)
            mine = torch.autograd.grad(again, inputs, g)
            for a, b in zip(mine, wanted, strict=True):
                assert relative_error(a, b) < 1e-3


@pytest.mark.gpu
def test_a_frozen_layer_has_second_derivatives_of_its_input():
    one = DLR(16, 8).to(DEVICE).requires_grad_(False)
    x = torch.randn(1, 140, 16, device=DEVICE, requires_grad=True)
    (first,) = torch.autograd.grad(one(x).square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    with ops.dispatch.recorded():
        (want,) = torch.autograd.grad(one(x).square().sum(), x, create_graph=True)
        (want,) = torch.autograd.grad(want.square().sum(), x)
    assert relative_error(second, want) < 1e-5


@pytest.mark.gpu
def test_a_replay_uses_the_stream_and_the_device_memory_of_its_call():
    one = DLR(16, 8).to(DEVICE)
    x = torch.randn(2, 200, 16, device=DEVICE)
    with torch.no_grad():
        want = [one(x) for _ in range(3)][-1]
        other = torch.cuda.Stream()
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            have = one(x)
        other.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = one(x)
        graph.replay()
    assert torch.equal(have, want)
    assert torch.equal(captured, want)


@pytest.fixture
def log_lambda(emulated):
    """The kernel of that name as `(re, im, result)` -> fp64 pairs, for any two inputs."""
    from dlrnn.ops.cuda import nvrtc

    return nvrtc.load(("dlr_layer.cu",), "log_lambda", (), 0, 0)


def test_the_third_call_of_the_same_sizes_runs_no_python(log_lambda):
    runs = []

    def function(re, im):
        runs.append(len(re))
        result = re.new_empty(len(re), 2, dtype=torch.float64)
        log_lambda(1, 128, re, im, result, len(re))
        return result

    replayed = Replayed(function, lambda: "")
    for size in (5, 5, 5, 7, 5):
        re, im = torch.randn(2, size).unbind()
        want = torch.stack((-(re.double() ** 2), im.double()), -1)
        assert torch.equal(replayed(re.clone(), im.clone()), want)
    assert runs == [5, 5, 7]


def test_a_function_with_other_ops_is_never_replayed(log_lambda):
    runs = []

    def function(re, im):
        runs.append(len(re))
        result = re.new_empty(len(re), 2, dtype=torch.float64)
        log_lambda(1, 128, re + 1, im, result, len(re))
        return result

    replayed = Replayed(function, lambda: "")
    for _ in range(ATTEMPTS + 2):
        re, im = torch.randn(5), torch.randn(5)
        assert torch.equal(replayed(re, im)[:, 0], -((re + 1).double() ** 2))
    assert len(runs) == ATTEMPTS + 2


def test_settings_strides_and_arguments_decide_the_launches(log_lambda):
    runs, settings = [], ["a"]

    def function(re, im, states):
        runs.append(states)
        result = re.new_empty(states, 2, dtype=torch.float64)
        log_lambda(1, 128, re.contiguous(), im, result, states)
        return result

    replayed = Replayed(function, lambda: settings[0])
    re, im = torch.randn(16), torch.randn(16)
    for _ in range(4):
        replayed(re, im, 16)
    assert len(runs) == 2
    settings[0] = "b"
    replayed(re, im, 16)
    assert len(runs) == 3
    assert replayed(re, im, 8).shape == (8, 2)
    strided = torch.randn(32)[::2]
    assert torch.equal(replayed(strided, im, 16)[:, 0], -(strided.double() ** 2))


def test_results_may_be_empty_views_or_arguments(log_lambda):
    def function(re, im):
        result = re.new_empty(3, len(re), 2, dtype=torch.float64)
        log_lambda(1, 128, re, im, result[1], len(re))
        return result[1], re.new_empty(0, 4), im, result[1, :, 0]

    replayed = Replayed(function, lambda: "")
    for _ in range(4):
        re, im = torch.randn(2, 6).unbind()
        re, im = re.clone(), im.clone()
        whole, empty, same, part = replayed(re, im)
        assert same is im
        assert empty.shape == (0, 4)
        assert torch.equal(whole[:, 0], part)
        assert torch.equal(part, -(re.double() ** 2))


def test_a_call_with_large_temporary_tensors_is_not_replayed(log_lambda, monkeypatch):
    """A replay would need all of them at once."""
    runs = []
    monkeypatch.setattr("dlrnn.ops.cuda.replay.MOST_BYTES", 200)

    def function(re, im):
        runs.append(len(re))
        for _ in range(3):
            result = re.new_empty(len(re), 2, dtype=torch.float64)
            log_lambda(1, 128, re, im, result, len(re))
        return result

    replayed = Replayed(function, lambda: "")
    for _ in range(4):
        re, im = torch.randn(6), torch.randn(6)
        assert torch.equal(replayed(re, im)[:, 0], -(re.double() ** 2))
    assert runs == [6] * 4


def test_a_recording_that_fails_is_tried_a_few_times(log_lambda):
    def function(re):
        raise MemoryError

    replayed = Replayed(function, lambda: "")
    for _ in range(ATTEMPTS + 2):
        with pytest.raises(MemoryError):
            replayed(torch.zeros(4))
    assert [*replayed._plans.values()] == [ATTEMPTS]


def test_only_the_layer_itself_is_one_op(monkeypatch):
    """Not a layer with another kernel: the op would ignore it."""
    from dlrnn.bench.listing import RoundedPhasesDLR

    assert RoundedPhasesDLR(16, 4)._as_one_op(torch.zeros(1, 200, 16)) is None
    taken = []
    monkeypatch.setattr(ops, "takes_dlr_layer", lambda *_: taken.append(1))
    layer = DLR(16, 4)
    assert layer._as_one_op(torch.zeros(1, 200, 16)) is None
    assert taken == [1]
    layer.modes = layer.modes
    layer._as_one_op(torch.zeros(1, 200, 16))
    assert taken == [1]


TRACED = """
import sys
import torch
from dlrnn import DLR

layer, module = DLR(16, 4), sys.modules["dlrnn.ops.dlr_layer"]

@torch.compile(fullgraph=True, backend="eager")
def conditions(x):
    plain = module.is_plain(x) and not module.records_choices() and not module.in_transform()
    return x + plain + 10 * layer._is_changed() + 100 * (layer._as_one_op(x) is None)

assert conditions(torch.zeros(1, 200, 16)).eq(101).all()
print("ok")
"""


def test_a_compiler_traces_the_choice_of_the_op():
    assert "ok" in run_python(TRACED)
