"""DSS, S4D and S4: what the continuous systems have beside the contract and their definitions."""

import pytest
import torch
from support import DEVICE, assert_close

from dlrnn.nn import DSS, S4, S4D
from dlrnn.ops import reference


@pytest.mark.parametrize(("mixer", "states"), [(DSS, 10), (S4D, 5)])
def test_modes_are_a_recurrence(mixer, states):
    layer = mixer(5, 10, project=False).to(DEVICE).double()
    x = torch.randn(2, 30, 5, dtype=torch.float64, device=DEVICE)
    W, log_lambda, D = layer.modes()
    assert log_lambda.dtype == torch.float64
    assert log_lambda.shape == W.shape == (5, states, 2)
    y, last = reference.recurrence(x.cpu(), W.cpu(), log_lambda.cpu())
    have, state = layer(x, return_state=True)
    assert_close(have, y + D.cpu() * x.cpu(), 1e-12)
    assert_close(state.x, last, 1e-12)


def test_dss_with_a_lambda_of_zero_sums():
    """At Lambda = 0 the system is a sum: every entry of the kernel is `Delta Re W`."""
    layer = DSS(2, 1).to(DEVICE, torch.float64)
    with torch.no_grad():
        layer.log_decay.fill_(-1000)  # exp(-1000) is 0 in float64
    kernel = layer.kernel(20)
    assert_close(kernel, (layer.log_dt.exp() * layer.W[:, 0, 0])[:, None].expand(2, 20), 1e-13)
    parameters = [getattr(layer, name) for name in layer.kernel_parameters]
    for gradient in torch.autograd.grad(kernel.sum(), parameters):
        assert gradient.isfinite().all()


def test_an_s4_kernel_is_the_beginning_of_a_longer_one():
    layer = S4(4).to(DEVICE).double()
    kernel = layer.kernel(2000)
    for length in (1, 2, 7, 1000, 1999):
        assert_close(layer.kernel(length), kernel[:, :length], 1e-11)


def test_every_parameter_value_of_s4_is_stable():
    layer = S4(3, 8).to(DEVICE).double()
    with torch.no_grad():
        layer.P.normal_(std=30)
        layer.log_decay -= 20
        layer.frequency *= 100
    assert layer.kernel(5000).isfinite().all()
    x = torch.randn(1, 5000, 3, dtype=torch.float64, device=DEVICE)
    _, state = layer(x, return_state=True)
    assert state.x.isfinite().all()
