"""Helpers that many tests share."""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

DEVICE = torch.device(os.environ.get("DLRNN_TEST_DEVICE", "cpu"))


def relative_error(value: Tensor, reference: Tensor) -> float:
    """||value - reference|| / ||reference||, absolute where the reference is exactly 0.

    NaN never passes a comparison.
    """
    value, reference = value.detach().cpu().double(), reference.detach().cpu().double()
    assert value.shape == reference.shape
    size = reference.norm().item()
    return (value - reference).norm().item() / (size if size else 1)


def assert_close(value: Tensor, reference: Tensor, tolerance: float) -> None:
    error = relative_error(value, reference)
    assert error <= tolerance, f"relative error {error:.2e}, allowed {tolerance:.0e}"


def random_modes(rows, states, dtype=torch.float64, modulus=(0.99, 1.0), seed=0):
    """W [rows, N, 2] and log lambda [N, 2] (float64) with |lambda| in the given range."""
    generator = torch.Generator().manual_seed(seed)
    W = torch.randn(rows, states, 2, generator=generator, dtype=torch.float64).to(dtype)
    low, high = modulus
    radius = low + (high - low) * torch.rand(states, generator=generator, dtype=torch.float64)
    phase = 6.3 * torch.rand(states, generator=generator, dtype=torch.float64)
    log_lambda = torch.stack((radius.log(), phase), dim=-1)
    return W.to(DEVICE), log_lambda.to(DEVICE)


def gradients(output, inputs, grad):
    return torch.autograd.grad(output, inputs, grad.to(output), materialize_grads=True)


def assert_agree(
    value, reference, inputs, tolerance, gradient_tolerance=None, *, truth=None, negligible=0.0
):
    """The values agree, and so do the gradients of a random sum of them, which are returned.

    `gradient_tolerance` is one number or one for each input. `truth` are the inputs of the
    reference, where they are other tensors. A gradient whose reference is at most `negligible`
    must itself be that small.
    """
    assert_close(value, reference, tolerance)
    grad = torch.randn(reference.shape, dtype=torch.float64)
    have = gradients(value, inputs, grad)
    expected = gradients(reference, inputs if truth is None else truth, grad)
    if not isinstance(gradient_tolerance, Sequence):
        gradient_tolerance = [gradient_tolerance or tolerance] * len(expected)
    for mine, other, allowed in zip(have, expected, gradient_tolerance, strict=True):
        if other.norm() > negligible or not negligible:
            assert_close(mine, other, allowed)
        else:
            assert mine.norm() <= negligible
    return have, expected


def in_chunks(layer, x, sizes, state=None):
    """The outputs for x [B, L, H], read in chunks of these sizes, and the last state."""
    outputs = []
    for chunk in x.split(sizes, dim=1):
        y, state = layer(chunk, state, return_state=True)
        outputs.append(y)
    return torch.cat(outputs, dim=1), state


def in_steps(layer, x, state=None):
    """The same, read position by position."""
    outputs = []
    for x_t in x.unbind(1):
        y, state = layer.step(x_t, state)
        outputs.append(y)
    return torch.stack(outputs, dim=1), state


@contextmanager
def refused(*keywords: str, error: type[Exception] = ValueError):
    """The block must raise `error` with a message that holds every keyword, as whole words."""
    with pytest.raises(error) as caught:
        yield
    message = str(caught.value)
    missing = [k for k in keywords if not re.search(rf"(?<!\w){re.escape(k)}(?!\w)", message)]
    assert not missing, f"{missing} not in: {message}"


def run_python(code: str, *arguments: str) -> str:
    """Run code in a fresh interpreter (no shape checker installed) and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:dlrnn", "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=900,  # a hang
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


INTERPRETER = """
import os
os.environ["TRITON_INTERPRET"] = "1"
import torch
from triton.runtime import interpreter

patch = interpreter._patch_lang_tensor
def patched(tensor, scope):  # loops up to an argument: NumPy no longer makes [3] an index
    patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())
interpreter._patch_lang_tensor = patched
"""


def run_interpreted(code: str) -> str:
    """`run_python` with torch, and Triton's interpreter for its kernels."""
    return run_python(INTERPRETER + code)


WORDS = [f"w{k}" for k in range(30)]


def tiny_tokenizer() -> bytes:
    """A tokenizer.json of 30 words; it cuts at spaces, and asks for truncation, as some do."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {token: k for k, token in enumerate(["<unk>", "</s>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.enable_truncation(5)
    return tokenizer.to_str().encode()


def tiny_books(folder, *, length: int = 32, words: int = 700):
    """A set of pg19 in `folder`/set, of three books in a language of 30 words, one a split."""
    from dlrnn.tasks.pg19 import books_set
    from dlrnn.tasks.storage.imports import write_set

    (folder / "tokenizer.json").write_bytes(tiny_tokenizer())
    for place, split in enumerate(("train", "validation", "test")):
        (folder / "books" / split).mkdir(parents=True)
        text = " ".join(WORDS[(k + place) ** 2 % 30] for k in range(words))
        (folder / "books" / split / "book.txt").write_text(text)
    spec = books_set(folder / "tokenizer.json", length)
    return write_set(spec, folder / "books", folder / "set")


@contextmanager
def tf32():
    """PyTorch may use tf32."""
    matmul = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "tf32"
    try:
        yield
    finally:
        matmul.fp32_precision = before
