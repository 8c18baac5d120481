"""Compile CUDA C++ with NVRTC at first use, and launch it.

Binaries are kept in the user's cache folder (`DLRNN_CACHE`, else `~/.cache/dlrnn`) under the hash
of source, options and compiler version. They are written to a temporary file and renamed, so that
any number of processes may compile at once. Kernels run on PyTorch's current stream; a CUDA graph
can capture them once they have been compiled.
"""

import contextlib
import ctypes
import hashlib
import logging
import os
import tempfile
import threading
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SOURCES = Path(__file__).parent
SHARED_BYTES = 8  # the attribute CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES

Defines = tuple[tuple[str, int], ...]
PROGRAMMATIC_LAUNCH = ("PROGRAMMATIC_LAUNCH", 1)
"""Marks kernels that are launched with programmatic dependent launch."""


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute with a number as its value."""

    _fields_ = (("id", ctypes.c_int), ("value", ctypes.c_int64), ("rest", ctypes.c_int64 * 7))


class _Launch(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("blocks", "blocks_y", "blocks_z")),
        *((name, ctypes.c_uint) for name in ("threads", "threads_y", "threads_z", "shared")),
        *(("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(_Attribute))),
        ("attribute_count", ctypes.c_uint),
    )


_PROGRAMMATIC_LAUNCH = _Attribute(
    id=6, value=1
)  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class Kernel:
    """A compiled kernel: call it with blocks, threads and its arguments.

    With `programmatic` dependent launch it may start while the previous kernel on the stream is
    still running, and waits for it with griddepcontrol.wait.
    """

    def __init__(
        self,
        function: ctypes.c_void_p,
        shared_bytes: int,
        device: int,
        context: int | None = None,
        programmatic: bool = False,
    ) -> None:
        self._function, self._shared_bytes, self._device = function, shared_bytes, device
        self._context, self._programmatic = context, programmatic
        self._buffers = threading.local()  # a launch in another thread must not overwrite them

    def __call__(
        self, blocks: int | tuple[int, int, int], threads: int, *arguments: Tensor | int
    ) -> None:
        """Launch on the device's current stream; tensors become addresses, numbers int."""
        try:
            values, launch, call = self._buffers.prepared
        except AttributeError:
            values, launch, call = self._buffers.prepared = self._prepare(len(arguments))
        for k, argument in enumerate(arguments):  # one loop: launches are frequent and short
            values[k] = argument if type(argument) is int else argument.data_ptr()  # type: ignore[union-attr]
        if type(blocks) is int:
            launch.blocks = blocks
        else:
            launch.blocks, launch.blocks_y, launch.blocks_z = blocks  # type: ignore[misc]
        launch.threads = threads
        launch.stream = torch._C._cuda_getCurrentRawStream(self._device)
        if _current_context() == self._context:
            _check(call())
        else:  # another device is the current one, or this thread has not called CUDA yet
            with torch.cuda.device(self._device):
                _make_context_current(self._device)
                _check(call())

    def _prepare(self, count: int) -> tuple[Any, _Launch, Callable[[], int]]:
        """Memory for the arguments, the launch, and the call that launches; for this thread."""
        values = (ctypes.c_int64 * count)()
        first, size = ctypes.addressof(values), ctypes.sizeof(ctypes.c_int64)
        addresses = (ctypes.c_void_p * count)(*range(first, first + size * count, size))
        launch = _Launch(1, 1, 1, 1, 1, 1, self._shared_bytes)
        launch.attributes = ctypes.pointer(_PROGRAMMATIC_LAUNCH)
        launch.attribute_count = int(self._programmatic)
        reference, nothing = ctypes.byref(launch), ctypes.c_void_p()
        function = _driver().cuLaunchKernelEx
        return values, launch, partial(function, reference, self._function, addresses, nothing)


def runs_on(x: Tensor, *, newer: bool = False, portable: bool = False) -> bool:
    """Whether x is a non-empty tensor on a Hopper GPU and NVRTC is available.

    A `newer` GPU may have a later compute capability; a `portable` kernel needs 8.0 or later.
    """
    if not (x.is_cuda and bool(x.numel() > 0)):
        return False
    have = capability(x.device)
    fits = have >= (8, 0) if portable else have >= (9, 0) if newer else have == (9, 0)
    return fits and available()


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability; that of Hopper for a CPU, where tests emulate it."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


def architecture(capability: tuple[int, int]) -> str:
    """The compiler's name; only Hopper's kernels use features of one architecture alone (`a`)."""
    return "sm_{}{}".format(*capability) + ("a" if capability == (9, 0) else "")


def aligned(x: Tensor) -> Tensor:
    """x, contiguous and aligned to 16 bytes."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def ceil_div(size: int, tile: int) -> int:
    """How many tiles cover `size`."""
    return -(-size // tile)


@cache
def load(
    files: tuple[str, ...], name: str, defines: Defines, shared_bytes: int, device: int
) -> Kernel:
    """Kernel `name` of the concatenated source files, on a CUDA device."""
    here = capability(torch.device("cuda", device))
    binary = cubin(files, defines, architecture(here))
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    with torch.cuda.device(device):
        _make_context_current(device)
        _check(_driver().cuModuleLoadData(ctypes.byref(module), binary))
        _check(_driver().cuModuleGetFunction(ctypes.byref(function), module, name.encode()))
        _check(_driver().cuFuncSetAttribute(function, SHARED_BYTES, shared_bytes))
        context = _current_context()
    return Kernel(function, shared_bytes, device, context, PROGRAMMATIC_LAUNCH in defines)


def _current_context() -> int | None:
    """The driver's current context; a thread that has not called CUDA yet (autograd's) has none."""
    context = ctypes.c_void_p()
    _check(_driver().cuCtxGetCurrent(ctypes.byref(context)))
    return context.value


def _make_context_current(device: int) -> None:
    """Use PyTorch's context."""
    if _current_context() is None:
        context = ctypes.c_void_p()
        _check(_driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
        _check(_driver().cuCtxSetCurrent(context))


@cache
def available() -> bool:
    """Whether NVRTC and the driver can be opened."""
    try:
        library(), _driver()
    except OSError:
        return False
    return True


# ---------------------------------------------------------------------------------- compiling


@cache
def cubin(files: tuple[str, ...], defines: Defines, architecture: str) -> bytes:
    """The binary of the concatenated source files, from the cache folder or compiled."""
    source = "\n".join((SOURCES / file).read_text() for file in files)
    options = [f"--gpu-architecture={architecture}", "--std=c++17"]
    options += [f"-D{name}={value}" for name, value in defines]
    key = hashlib.sha256("\0".join((source, *options, _version())).encode()).hexdigest()
    path = cache_folder() / f"{Path(files[-1]).stem}-{key[:32]}.cubin"
    if path.exists():
        return path.read_bytes()
    _announce(architecture, path.parent)
    binary = compile_source(source, options)
    with contextlib.suppress(OSError):  # without a writable cache the next process compiles again
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as temporary:
            temporary.write(binary)
        os.replace(temporary.name, path)
    return binary


@cache
def _announce(architecture: str, folder: Path) -> None:
    text = "compiling kernels for %s, for the first time here: about 20 s; they are kept in %s"
    logging.getLogger("dlrnn").warning(text, architecture, folder)


def cache_folder() -> Path:
    """The folder of compiled kernels."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("DLRNN_CACHE") or Path(home) / "dlrnn")


def compile_source(source: str, options: list[str]) -> bytes:
    """The cubin of a CUDA C++ source."""
    nvrtc, program = library(), ctypes.c_void_p()
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
def library() -> ctypes.CDLL:
    """NVRTC: by its name if the loader finds it, else from the nvidia packages beside PyTorch's."""
    version = torch.version.cuda
    name = f"libnvrtc.so.{version.split('.')[0]}" if version else "libnvrtc.so.*"
    with contextlib.suppress(OSError):
        return ctypes.CDLL(name)
    for path in sorted((Path(torch.__file__).parents[1] / "nvidia").glob(f"*/lib/{name}")):
        for builtins in path.parent.glob("libnvrtc-builtins.so.*"):  # NVRTC looks for them by name
            ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
        return ctypes.CDLL(str(path))
    raise OSError(f"{name} was not found: is PyTorch a CUDA build?")


def _version() -> str:
    major, minor = ctypes.c_int(), ctypes.c_int()
    library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(result: int) -> None:
    if result:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(result, ctypes.byref(text))
        raise RuntimeError(f"CUDA error {result}: {(text.value or b'unknown').decode()}")
