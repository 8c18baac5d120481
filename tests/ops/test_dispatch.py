"""Which implementation of an op runs, and what a requested backend means."""

import importlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from inspect import isfunction
from types import SimpleNamespace

import pytest
import torch
from support import DEVICE, assert_close, random_modes, run_python

from dlrnn import DLR, ops
from dlrnn.bench import doctor
from dlrnn.common.device import on_its_device
from dlrnn.ops import dispatch


@pytest.fixture
def gpu(monkeypatch, unchecked):
    """A tensor on a GPU, as far as the dispatcher looks at it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    pytest.importorskip("triton")
    return SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, device="cuda:0")


@pytest.mark.parametrize("op", dispatch.OPS)
def test_a_requested_backend_that_cannot_take_the_tensors_raises_for_every_op(op, gpu):
    with ops.use_backend("fused"), pytest.raises(ValueError, match=f"'fused'.*{op} .*bfloat16"):
        dispatch.uses_fused(op, gpu, lambda: False)


@pytest.mark.parametrize("op", dispatch.OPS)
def test_without_a_request_an_op_runs_what_it_can(op, gpu):
    assert not dispatch.uses_fused(op, gpu, lambda: False)
    assert dispatch.uses_fused(op, gpu, lambda: True) == (op in dispatch.FUSED)
    with ops.use_backend("torch"):
        assert not dispatch.uses_fused(op, gpu, lambda: True)


def test_fused_kernels_cannot_be_requested_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"'fused'.*no CUDA device"), ops.use_backend("fused"):
        pass


def test_an_unknown_backend_is_refused_and_leaves_no_request():
    with pytest.raises(ValueError, match=r"'cuneiform'.*fused or torch"):  # noqa: SIM117
        with ops.use_backend("cuneiform"):
            pass
    ops.vandermonde(*random_modes(2, 3), 8)


def test_threads_that_request_the_same_backend_can_end_in_any_order():
    first, second = ops.use_backend("torch"), ops.use_backend("torch")
    first.__enter__()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(second.__enter__).result()
        first.__exit__(None, None, None)
        with dispatch.recorded() as choices:
            ops.linear(torch.ones(2, 2), torch.ones(2, 2))
        thread.submit(second.__exit__, None, None, None).result()
    assert [choice.reason for choice in choices] == ["requested"]
    with dispatch.recorded() as choices:
        ops.linear(torch.ones(2, 2), torch.ones(2, 2))
    assert [choice.reason for choice in choices] == ["the tensors are not on a GPU"]


def test_a_second_thread_cannot_request_another_backend(gpu):
    with ops.use_backend("torch"), ThreadPoolExecutor(1) as thread:
        other = ops.use_backend("fused")
        with pytest.raises(ValueError, match="another thread has requested 'torch'"):
            thread.submit(other.__enter__).result()
        assert not dispatch.uses_fused("step", gpu, lambda: True)
    with ops.use_backend("fused"), ops.use_backend("torch"):  # one thread may
        assert not dispatch.uses_fused("step", gpu, lambda: True)


def test_every_context_that_is_open_records():
    with dispatch.recorded() as outer:
        with dispatch.recorded() as inner:
            ops.linear(torch.ones(2, 2), torch.ones(2, 2))
        ops.linear(torch.ones(2, 2), torch.ones(2, 2))
    assert (len(outer), len(inner)) == (2, 1)
    assert not dispatch.records_choices()


@pytest.mark.parametrize("backend", ["cuneiform", "fused"])
def test_the_environment_variable_is_a_request(backend):
    """For the whole layer, and for ops that have a short way of their own."""
    calls = {
        "layer": "dlrnn.DLR(2, 4)(torch.ones(1, 8, 2))",
        "step": "dlrnn.DLR(2, 4).step(torch.ones(1, 2))",
        "norm": "dlrnn.ops.layer_norm(torch.ones(2, 2), torch.ones(2), torch.ones(2))",
        "linear": "dlrnn.ops.linear(torch.ones(2, 2), torch.ones(2, 2))",
        "short": "dlrnn.ops.convolution(torch.ones(1, 8, 2), torch.ones(2, 3))",
    }
    code = f"import os; os.environ['DLRNN_BACKEND'] = {backend!r}\nimport torch, dlrnn\n"
    for name, call in calls.items():
        code += f"try: {call}; print('{name} ran')\nexcept ValueError as e: print('{name}', e)\n"
    lines = run_python(code).splitlines()
    assert len(lines) == len(calls)
    for name, line in zip(calls, lines, strict=True):
        assert line.startswith(f"{name} backend '{backend}' was requested"), line


def test_what_ran_is_recorded_with_its_reason():
    with dispatch.recorded() as choices:
        DLR(16, 4).to(DEVICE)(torch.randn(1, 256, 16, device=DEVICE))
    found = {choice.op: choice for choice in choices}
    assert {"vandermonde", "convolution"} <= found.keys() | {"mix"}
    if DEVICE.type == "cpu":
        assert {choice.backend for choice in choices} == {"torch"}
        assert all("not on a GPU" in choice.reason for choice in choices)


def test_doctor_reports_a_requested_backend_that_is_missing():
    """Every op that cannot run it has a row with the reason, which names the variable."""
    code = "import os; os.environ['DLRNN_BACKEND'] = 'fused'\nfrom dlrnn.bench import doctor\n"
    code += "for row in doctor.examine('cpu'): print(row['op'], row['ok'], row['why'])"
    lines = run_python(code).splitlines()
    assert len(lines) == len(dispatch.OPS)
    for op, line in zip(dispatch.OPS, lines, strict=True):
        assert line.startswith(f"{op} False")
        assert "DLRNN_BACKEND" in line


def test_doctor_reports_what_its_cases_ran():
    rows = doctor.examine(str(DEVICE))
    assert {row["op"] for row in rows} == set(dispatch.OPS)
    for row in rows:
        assert row["ok"], row
        assert row["why"]
        if DEVICE.type == "cpu":
            assert row["backend"] == "torch"


@pytest.mark.parametrize(
    ("op", "shape"),
    [
        (lambda x: ops.layer_norm(x, x[0, 0], x[0, 1]), (2, 3, 16)),
        (lambda x: ops.linear(x, x[0], x[0, :, 0]), (2, 3, 16)),
        (lambda x: ops.rotate(x, torch.arange(3, device=x.device)[None]), (2, 3, 4, 16)),
    ],
    ids=["layer_norm", "linear", "rotate"],
)
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_forward_mode_is_right_where_pytorch_computes(op, shape):
    """On a GPU as well, where jvp would give zeros for an op of our own."""
    x, v = torch.randn(2, *shape, dtype=torch.float64).float()
    _, want = torch.func.jvp(op, (x.double(),), (v.double(),))
    _, have = torch.func.jvp(op, (x.to(DEVICE),), (v.to(DEVICE),))
    assert want.norm() > 1
    assert_close(have.cpu(), want, 1e-5)


def test_triton_launches_on_the_device_of_its_tensors(monkeypatch):
    """Every function that launches; which device is made the current one, by a stand-in."""
    pytest.importorskip("triton")
    kernels = ["dplr_weights", "layer_norm", "rotary", "sections", "thin_linear", "zero_order_hold"]
    launching = []
    for name in (
        *(f"dlrnn.ops.triton.{kernel}" for kernel in kernels),
        "dlrnn.tasks.atomic.triton_kernels",
    ):
        module = importlib.import_module(name)
        own = [
            each
            for key, each in vars(module).items()
            if isfunction(each) and each.__module__ == name and key[0] != "_" and key != "supports"
        ]
        assert own
        assert all(hasattr(each, "__wrapped__") for each in own), name
        launching += own
    assert len(launching) == 14

    current = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext(current.append(device)))
    there = SimpleNamespace(is_cuda=True, device="cuda:1")
    run = on_its_device(lambda first, *rest, **more: (first, rest, more, list(current)))
    assert run(there, 2, x=3) == (there, (2,), {"x": 3}, ["cuda:1"])
    assert run(((there,), 4))[-1] == ["cuda:1"] * 2
    assert run(torch.ones(1))[-1] == ["cuda:1"] * 2
