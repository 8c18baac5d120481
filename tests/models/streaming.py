"""Whole = chunks = steps, for models."""

import torch
from support import assert_close


def assert_streams(model, x):
    """Outputs for x [2, 30, ...] are the same when it is read whole, in chunks, and in steps."""
    whole, state, outputs = model(x), None, []
    for chunk in x[:, :20].split([1, 6, 13], dim=1):
        y, state = model(chunk, state=state, return_state=True)
        outputs.append(y)
    assert_close(model(x[:, 20:], state=state), whole[:, 20:], 1e-10)
    for x_t in x[:, 20:].unbind(1):
        y, state = model.step(x_t, state)
        outputs.append(y[:, None])
    assert_close(torch.cat(outputs, dim=1), whole, 1e-10)
    assert_close(model.step(x[:, 0], model.initial_state(2))[0], whole[:, 0], 1e-10)
