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
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

SOURCES = Path(__file__).parent
SHARED_BYTES = 8  # the attribute CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES

# Bytes of shared memory that a block may have, by compute capability; the least for all others.
LEAST_SHARED_MEMORY = 101376
SHARED_MEMORY = {(8, 0): 166912, (8, 7): 166912, (9, 0): 232448, (10, 0): 232448}

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


class Launch(NamedTuple):
    """A launch of a kernel; tensors among the arguments stand for their addresses."""

    kernel: "Kernel"
    blocks: tuple[int, int, int]
    threads: int
    arguments: tuple[Tensor | int, ...]

    def prepared(self, values: int) -> "Prepared":
        """The launch with its arguments, eight bytes each, at the address `values`."""
        count, (x, y, z) = len(self.arguments), self.blocks
        return self.kernel.prepared(x, y, z, self.threads, values, count)


class Prepared(NamedTuple):
    """A launch that can be repeated: `call` returns the driver's error code."""

    config: "_Launch"
    call: Callable[[], int]
    memory: object  # that `config` points to


class _Recording(threading.local):
    """What this thread records."""

    launches: list[Launch] | None = None


recording = _Recording()


@contextlib.contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Collects the launches of this thread inside the context."""
    launches: list[Launch] = []
    recording.launches = launches
    try:
        yield launches
    finally:
        recording.launches = None


def stop_recording() -> None:
    """Drop what this thread has recorded, with the tensors in it, and record no more."""
    if recording.launches is not None:
        recording.launches.clear()
        recording.launches = None


class Kernel:
    """A compiled kernel: call it with blocks, threads and its arguments.

    With `programmatic` dependent launch it may start while the previous kernel on the stream is
    still running, and waits for it with griddepcontrol.wait. GPUs before Hopper do not have it.
    """

    def __init__(
        self,
        function: ctypes.c_void_p,
        shared_bytes: int,
        device: int,
        programmatic: bool = False,
    ) -> None:
        self._function, self._shared_bytes, self._device = function, shared_bytes, device
        self._programmatic = programmatic

    def __call__(
        self, blocks: int | tuple[int, int, int], threads: int, *arguments: Tensor | int
    ) -> None:
        """Launch on the device's current stream; tensors become addresses, numbers int."""
        grid = (blocks, 1, 1) if isinstance(blocks, int) else blocks
        launch = Launch(self, grid, threads, arguments)
        if recording.launches is not None:
            recording.launches.append(launch)
        addresses = (x.data_ptr() if isinstance(x, Tensor) else x for x in arguments)
        values = (ctypes.c_int64 * len(arguments))(*addresses)
        run([launch.prepared(ctypes.addressof(values))], self._device)

    def prepared(  # noqa: PLR0917
        self, x: int, y: int, z: int, threads: int, values: int, count: int
    ) -> Prepared:
        """A launch of x y z blocks with `count` arguments at the address `values`."""
        size = ctypes.sizeof(ctypes.c_int64)
        addresses = (ctypes.c_void_p * count)(*range(values, values + size * count, size))
        launch = _Launch(x, y, z, threads, 1, 1, self._shared_bytes)
        launch.attributes = ctypes.pointer(_PROGRAMMATIC_LAUNCH)
        launch.attribute_count = int(self._programmatic)
        reference, nothing = ctypes.byref(launch), ctypes.c_void_p()
        call = partial(_driver().cuLaunchKernelEx, reference, self._function, addresses, nothing)
        return Prepared(launch, call, addresses)


def run(launches: Sequence[Prepared], device: int) -> None:
    """Launch on the device's current stream."""
    if torch.cuda.current_device() != device or _current_context() is None:
        # another device is the current one, or this thread (autograd's) has not called CUDA yet
        with torch.cuda.device(device):
            _make_context_current(device)
            _run(launches, device)
    else:
        _run(launches, device)


def _run(launches: Sequence[Prepared], device: int) -> None:
    stream = torch._C._cuda_getCurrentRawStream(device)
    for config, call, _ in launches:
        config.stream = stream
        if error := call():
            _check(error)


def runs_on(x: Tensor) -> bool:
    """Whether x is not empty, on a GPU of compute capability 8.0 or later that NVRTC serves."""
    return x.is_cuda and bool(x.numel() > 0) and capability(x.device) >= (8, 0) and available()


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability; that of Hopper for a CPU, where tests emulate it.

    DLRNN_COMPUTE_CAPABILITY (8.0, 8.6, ...) names an older GPU, to test the kernels for it.
    """
    if device.type != "cuda":
        return (9, 0)
    requested, own = _requested_capability(), _own_capability(device)
    if not requested:
        return own
    major, _, minor = requested.partition(".")
    if not (major.isdecimal() and minor.isdecimal() and (int(major), int(minor)) <= own):
        most = "{}.{}".format(*own)
        raise ValueError(
            f"DLRNN_COMPUTE_CAPABILITY must be like 8.0, and at most {most}, this GPU's own, not"
            f" {requested!r}"
        )
    return int(major), int(minor)


def _requested_capability() -> str | None:
    return os.environ.get("DLRNN_COMPUTE_CAPABILITY")


def _own_capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def shared_memory_bytes(device: torch.device) -> int:
    """Shared memory that a block may have; a Hopper GPU's, if this PyTorch does not tell."""
    if _requested_capability() or device.type != "cuda":
        return SHARED_MEMORY.get(capability(device), LEAST_SHARED_MEMORY)
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", SHARED_MEMORY[9, 0])


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
    where = torch.device("cuda", device)
    have = capability(where)
    # PTX of another architecture, which the driver compiles for this device, stands for that GPU
    is_own = have == _own_capability(where)
    target = architecture(have) if is_own else "compute_{}{}".format(*have)
    binary = cubin(files, defines, target)
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    with torch.cuda.device(device):
        _make_context_current(device)
        _check(_driver().cuModuleLoadData(ctypes.byref(module), binary))
        _check(_driver().cuModuleGetFunction(ctypes.byref(function), module, name.encode()))
        _check(_driver().cuFuncSetAttribute(function, SHARED_BYTES, shared_bytes))
    programmatic = PROGRAMMATIC_LAUNCH in defines and have >= (9, 0)
    return Kernel(function, shared_bytes, device, programmatic)


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
    """The binary of the concatenated source files, from the cache folder or compiled.

    For a virtual architecture (compute_80) it is PTX.
    """
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
    """The cubin of a CUDA C++ source, or its PTX for a virtual architecture."""
    nvrtc, program = library(), ctypes.c_void_p()
    nothing = ctypes.c_void_p()
    nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), source.encode(), b"dlrnn.cu", 0, nothing, nothing
    )
    flags = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    if nvrtc.nvrtcCompileProgram(program, len(options), flags):
        log = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
        raise RuntimeError(f"NVRTC could not compile a kernel of dlrnn: {log.decode()}")
    is_virtual = any("=compute_" in option for option in options)
    kind = "PTX" if is_virtual else "CUBIN"
    size_of, read = getattr(nvrtc, f"nvrtcGet{kind}Size"), getattr(nvrtc, f"nvrtcGet{kind}")
    binary = _text(size_of, read, program)
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
