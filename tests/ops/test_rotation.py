"""`ops.rotate`: turns of pairs; its kernel in the interpreter and on a GPU."""

import pytest
import torch
from support import DEVICE, assert_close, relative_error, run_interpreted

from dlrnn import ops

ON_GPU = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device: make test-gpu")

INTERPRETED = """
from dlrnn import ops
from dlrnn.ops.triton import rotation as kernels

torch.manual_seed(0)
for batch, length, heads, width, of, dtype in [
    (1, 1, 1, 2, 1, torch.float32), (2, 37, 3, 8, 1, torch.float32),
    (3, 40, 4, 32, 3, torch.float32), (2, 50, 2, 6, 1, torch.bfloat16),
]:
    x = torch.randn(batch, length, 2 * heads, width).to(dtype)[:, :, :heads]  # of a wider tensor
    cos, sin = (f(torch.randn(of, length, width // 2)) for f in (torch.cos, torch.sin))
    for back in (False, True):
        have = kernels.rotate(x, cos, sin, back=back)
        want = ops.rotate(x, cos, -sin if back else sin)
        assert have.dtype == dtype and have.is_contiguous()
        far = (have.float() - want.float()).abs() / want.float().abs().clamp(min=0.1)
        allowed = 2e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
        assert far.max() <= allowed, (width, dtype, far.max())
print("right")
"""


def made(batch, length, heads, width, of, dtype=torch.float64):
    x = torch.randn(batch, length, heads, width, dtype=dtype, device=DEVICE, requires_grad=True)
    angles = torch.randn(of, length, width // 2, dtype=torch.float64, device=DEVICE)
    kind = torch.promote_types(dtype, torch.float32)
    return x, angles.cos().to(kind), angles.sin().to(kind)


@pytest.mark.parametrize("of", [1, 3])
def test_it_is_a_complex_product(of):
    x, cos, sin = made(3, 5, 2, 8, of)
    a, b = x.chunk(2, dim=-1)
    z = torch.complex(a, b) * torch.complex(cos, sin)[:, :, None]
    assert_close(ops.rotate(x, cos, sin), torch.cat((z.real, z.imag), dim=-1), 1e-14)
    back = ops.rotate(ops.rotate(x, cos, sin), cos, -sin)
    assert_close(back, x, 1e-14)


def test_kernel_in_the_interpreter():
    pytest.importorskip("triton")
    assert "right" in run_interpreted(INTERPRETED)


@ON_GPU
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [(1, 1, 1, 2, 1), (3, 700, 4, 32, 1), (2, 300, 3, 6, 2)], ids=str)
def test_on_a_gpu(size, dtype):
    x, cos, sin = made(*size, dtype)
    y = ops.rotate(x, cos, sin)
    dy = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, x, dy)
    exact = x.detach().double().requires_grad_()
    want = ops.rotate(exact, cos.double(), sin.double())
    (wanted,) = torch.autograd.grad(want, exact, dy.double())
    for have, other in ((y, want), (dx, wanted)):
        assert relative_error(have, other) < 2 * torch.finfo(dtype).eps
    with ops.use_backend("torch"):
        assert_close(ops.rotate(x, cos, sin).float(), y.float(), 4 * torch.finfo(dtype).eps)
