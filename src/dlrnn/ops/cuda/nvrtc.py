"""CUDA C++ compiled at first use by the NVRTC library that PyTorch brings, and launched.

A binary is kept in the user's cache folder (`DLRNN_CACHE`, else `~/.cache/dlrnn`) under the hash of
its source, its options and the compiler's version; it is written beside and renamed, so that any
number of processes may compile at once. Kernels run on PyTorch's current stream: a CUDA graph can
capture them, once they have been compiled.
"""

import contextlib
import ctypes
import hashlib
import logging
import os
import tempfile
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

SOURCES = Path(__file__).parent
SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES

Defines = tuple[tuple[str, int], ...]
STARTS_EARLY = ("STARTS_EARLY", 1)


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute, of a number."""

    _fields_ = (("id", ctypes.c_int), ("value", ctypes.c_int64), ("rest", ctypes.c_int64 * 7))


class _Launch(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        *(("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint)),
        *(("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(_Attribute))),
        ("attribute_count", ctypes.c_uint),
    )


_PROGRAMMATIC = _Attribute(id=6, value=1)  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class Kernel:
    """A compiled kernel: call it with blocks, threads and its arguments.

    One that starts early may begin while the kernel before it ends, and waits for it by itself
    (griddepcontrol.wait).
    """

    def __init__(
        self, function: ctypes.c_void_p, shared_bytes: int, device: int, early: bool = False
    ) -> None:
        self._function, self._shared_bytes, self._device = function, shared_bytes, device
        self._early = early

    def __call__(
        self, blocks: int | tuple[int, int, int], threads: int, *arguments: Tensor | int
    ) -> None:
        """Launch on the device's current stream; a tensor is its address, a number an int."""
        values = [
            ctypes.c_void_p(a.data_ptr()) if isinstance(a, Tensor) else ctypes.c_int(a)
            for a in arguments
        ]
        addresses = (ctypes.c_void_p * len(values))(
            *(ctypes.cast(ctypes.byref(value), ctypes.c_void_p) for value in values)
        )
        grid = (blocks, 1, 1) if isinstance(blocks, int) else blocks
        with torch.cuda.device(self._device):
            _make_context_current(self._device)
            launch = _Launch(
                *(grid, (threads, 1, 1), self._shared_bytes),
                *(torch.cuda.current_stream().cuda_stream, ctypes.pointer(_PROGRAMMATIC)),
                int(self._early),
            )
            _check(
                _driver().cuLaunchKernelEx(
                    ctypes.byref(launch), self._function, addresses, ctypes.c_void_p()
                )
            )


def aligned(x: Tensor) -> Tensor:
    """Contiguous, from a multiple of 16 bytes on."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


@cache
def load(
    files: tuple[str, ...], name: str, defines: Defines, shared_bytes: int, device: int
) -> Kernel:
    """Kernel `name` of these source files, read one after the other, on a CUDA device; one of which
    `STARTS_EARLY` is defined does.
    """
    major, minor = torch.cuda.get_device_capability(device)
    binary = _binary(files, defines, f"sm_{major}{minor}a")
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    with torch.cuda.device(device):
        _make_context_current(device)
        _check(_driver().cuModuleLoadData(ctypes.byref(module), binary))
        _check(_driver().cuModuleGetFunction(ctypes.byref(function), module, name.encode()))
        _check(_driver().cuFuncSetAttribute(function, SHARED_BYTES, shared_bytes))
    return Kernel(function, shared_bytes, device, STARTS_EARLY in defines)


def _make_context_current(device: int) -> None:
    """PyTorch's context; a thread that has not called CUDA yet (autograd's) has none."""
    context = ctypes.c_void_p()
    _check(_driver().cuCtxGetCurrent(ctypes.byref(context)))
    if context.value is None:
        _check(_driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
        _check(_driver().cuCtxSetCurrent(context))


@cache
def available() -> bool:
    """NVRTC and the driver can be opened."""
    try:
        _nvrtc(), _driver()
    except OSError:
        return False
    return True


# ---------------------------------------------------------------------------------- compiling


@cache
def _binary(files: tuple[str, ...], defines: Defines, architecture: str) -> bytes:
    source = "\n".join((SOURCES / file).read_text() for file in files)
    options = [f"--gpu-architecture={architecture}", "--std=c++17"]
    options += [f"-D{name}={value}" for name, value in defines]
    key = hashlib.sha256("\0".join((source, *options, _version())).encode()).hexdigest()
    path = _cache_folder() / f"{Path(files[-1]).stem}-{key[:32]}.cubin"
    if path.exists():
        return path.read_bytes()
    _say_once(architecture, path.parent)
    binary = _compile(source, options)
    with contextlib.suppress(OSError):  # a cache that cannot be written is compiled again
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as beside:
            beside.write(binary)
        os.replace(beside.name, path)
    return binary


@cache
def _say_once(architecture: str, folder: Path) -> None:
    text = "compiling kernels for %s, for the first time here: about 20 s; they are kept in %s"
    logging.getLogger("dlrnn").warning(text, architecture, folder)


def _cache_folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("DLRNN_CACHE") or Path(home) / "dlrnn")


def _compile(source: str, options: list[str]) -> bytes:
    nvrtc, program = _nvrtc(), ctypes.c_void_p()
    nothing = ctypes.c_void_p()
    nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), source.encode(), b"dlrnn.cu", 0, nothing, nothing
    )
    flags = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    if nvrtc.nvrtcCompileProgram(program, len(options), flags):
        log = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
        raise RuntimeError(f"NVRTC could not compile a kernel of dlrnn: {log.decode()}")
    binary = _text(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return binary


def _text(size_of: "ctypes._FuncPointer", read: "ctypes._FuncPointer", program: object) -> bytes:
    size = ctypes.c_size_t()
    size_of(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    read(program, buffer)
    return buffer.raw


# ---------------------------------------------------------------------------------- libraries


@cache
def _nvrtc() -> ctypes.CDLL:
    """By its name if the loader knows it, else from the packages that PyTorch came with."""
    version = torch.version.cuda
    name = f"libnvrtc.so.{version.split('.')[0]}" if version else "libnvrtc.so.*"
    with contextlib.suppress(OSError):
        return ctypes.CDLL(name)
    for path in sorted((Path(torch.__file__).parents[1] / "nvidia").glob(f"*/lib/{name}")):
        for builtins in path.parent.glob("libnvrtc-builtins.so.*"):  # which it looks for by name
            ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
        return ctypes.CDLL(str(path))
    raise OSError(f"{name} was not found: is PyTorch a CUDA build?")


def _version() -> str:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(result: int) -> None:
    if result:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(result, ctypes.byref(text))
        raise RuntimeError(f"CUDA error {result}: {(text.value or b'unknown').decode()}")
