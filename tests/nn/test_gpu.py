"""The layer on a GPU: CUDA graphs, no synchronisation, the benchmark."""

import warnings

import pytest
import torch
from support import DEVICE, assert_close

from dlrnn import DLR

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("options", [{}, {"cast": "prod"}, {"bidirectional": True}], ids=str)
def test_forward_and_backward_can_be_captured(options):
    """No synchronisation, no copy from the host: a CUDA graph replays the whole step."""
    layer = DLR(8, 32, **options).to(DEVICE)
    x = torch.randn(2, 500, 8, device=DEVICE)

    def run():
        inputs = (x.detach().requires_grad_(), *layer.parameters())
        y = layer(inputs[0])
        return [y.detach(), *torch.autograd.grad(y, inputs, torch.ones_like(y))]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run()
    x.normal_()
    graph.replay()
    for have, want in zip(outputs, run(), strict=True):
        assert_close(have, want, 1e-6)


def test_no_call_synchronises_with_the_device():
    layer = DLR(8, 32).to(DEVICE)
    x = torch.randn(2, 500, 8, device=DEVICE, requires_grad=True)
    lengths = torch.tensor([500, 20], device=DEVICE)
    layer(x).sum().backward()
    warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
    try:
        torch.cuda.set_sync_debug_mode("error")
        layer(x, lengths=lengths).sum().backward()
        y, state = layer(x, return_state=True)
        layer.step(y[:, 0], state)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_bench_times_the_captured_layer():
    from dlrnn.bench.layer import bench_layer

    result = bench_layer(batch=2, d_model=8, d_state=64, length=300, device="cuda", repeats=2)
    assert 0 < result["dlrnn"]["captured_ms"] < 10 * result["dlrnn"]["ms"]
