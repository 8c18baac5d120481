import pytest
from support import random_modes, run_python

from dlrnn import ops
from dlrnn.ops.backends import BACKENDS


@pytest.mark.parametrize("op", BACKENDS)
def test_the_default_is_named_with_a_reason(op):
    name, why = ops.backend_for(op)
    assert name in BACKENDS[op]
    assert why


def test_asked_for_and_there():
    W, log_lambda = random_modes(2, 3)
    with ops.use_backend("torch"):
        assert ops.backend_for("vandermonde") == ("torch", "asked for")
        ops.vandermonde(W, log_lambda, 8)


def test_asked_for_and_not_there_is_an_error():
    with (
        pytest.raises(ValueError, match="backend 'cuneiform' was asked for"),
        ops.use_backend("cuneiform"),
    ):
        pass
    assert ops.backend_for("step")[0] == "torch"


def test_the_variable_is_heard():
    code = (
        "import os; os.environ['DLRNN_BACKEND'] = 'cuneiform'\n"
        "import torch, dlrnn\n"
        "try: dlrnn.DLR(2, 4)(torch.ones(1, 8, 2))\n"
        "except ValueError as error: print(error)"
    )
    assert "backend 'cuneiform' was asked for, and vandermonde has only: " in run_python(code)
