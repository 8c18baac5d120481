"""The CUDA sources of `ops.cuda` on a CPU, compiled by g++ behind emulator.cpp.

It shows whether numbers, addresses and barriers of a kernel are right; it does not show its speed.
Functions that are written in assembler are left out of the sources: emulator.cpp has them, tensor
cores by their definition. Every tensor that a kernel is given ends at a page without access.
"""

import ctypes
import hashlib
import mmap
import os
import re
import subprocess
from functools import cache
from pathlib import Path

import torch

from dlrnn.ops.cuda import (
    channel_vandermonde,
    convolution,
    nvrtc,
    output_stage,
    recurrence_step,
    vandermonde,
)

HERE = Path(__file__).with_name("emulator.cpp")
KERNEL = r'extern "C" __global__ void\s+(?:__launch_bounds__\((?:[^()]|\([^()]*\))*\)\s+)?(\w+)\('
MULTIPROCESSORS = 3


def emulate(monkeypatch, folder: Path) -> None:
    """Make the kernels of `ops.cuda` run on CPU tensors, as on a small GPU."""

    def load(files, name, defines, shared_bytes, _):
        return Kernel(_compiled(files, defines, folder), name, shared_bytes)

    def run(launches, _):
        for launch in launches:
            assert not (wrong := launch.call()), wrong

    monkeypatch.setattr(nvrtc, "load", load)
    monkeypatch.setattr(nvrtc, "run", run)
    for module in (channel_vandermonde, convolution, output_stage, recurrence_step, vandermonde):
        monkeypatch.setattr(module, "multiprocessors", lambda _: MULTIPROCESSORS)


@cache
def _compiled(files, defines, folder: Path) -> ctypes.CDLL:
    return compiled("".join((nvrtc.SOURCES / file).read_text() for file in files), defines, folder)


def compiled(source: str, defines, folder: Path) -> ctypes.CDLL:
    """A shared library with all kernels of a CUDA source."""
    source = _without_assembler(source)
    source = re.sub(
        r"^( *)extern __shared__ (?:__align__\(\d+\) )?([\w ]+) (\w+)\[\];",
        lambda found: (
            f"{found[1]}{found[2]}* {found[3]} = ({found[2]}*)shared_memory;"
            if found[1]
            else f"#define {found[3]} (({found[2]}*)shared_memory)"
        ),
        source,
        flags=re.M,
    )
    for found in reversed(
        list(re.finditer(KERNEL, source))
    ):  # from the last one on: positions stay valid
        end = _end(source, source.index("{", found.end()))
        source = f"{source[:end]}\nENTRY({found[1]})\n{source[end:]}"
    name = hashlib.sha256(f"{source}{defines}".encode()).hexdigest()[:32]
    made = folder / f"{name}.so"
    if not made.exists():  # another process of the tests may have compiled it
        path = folder / f"{name}-{os.getpid()}.cpp"
        path.write_text(f'#include "{HERE}"\n{source}')
        options = ["-std=c++20", "-O1", "-U_FORTIFY_SOURCE", "-w", "-shared", "-fPIC", "-mf16c"]
        options += [f"-D{key}={value}" for key, value in defines]
        part = path.with_suffix(".part")
        subprocess.run(["g++", *options, path, "-o", part], check=True)
        part.replace(made)
    return ctypes.CDLL(str(made))


def _without_assembler(source: str) -> str:
    """The source without functions that contain inline assembly and macros that define them."""
    source = re.sub(r"^#define (?:.*\\\n)*.*\bWGMMA(?:.*\\\n)*.*\n", "", source, flags=re.M)
    source = re.sub(r"^FROM_\w+\(.*\)\n", "", source, flags=re.M)
    result, last = "", 0
    for found in re.finditer(r"^(?:template <.*>\n)?__device__ inline [^;{}]*\{", source, re.M):
        if found.start() < last:
            continue
        end = _end(source, found.end() - 1)
        if re.search(r"\basm\b", source[found.start() : end]):
            result, last = result + source[last : found.start()], end
    return result + source[last:]


def _end(source: str, brace: int) -> int:
    """The index after the brace that closes the one at `brace`."""
    end, depth = brace + 1, 1
    while depth:
        depth += {"{": 1, "}": -1}.get(source[end], 0)
        end += 1
    return end


class Kernel(nvrtc.Kernel):
    """An emulated kernel, called with CPU tensors."""

    def __init__(self, library: ctypes.CDLL, name: str, shared_bytes: int) -> None:
        self._run, self._name, self._shared_bytes = library[f"run_{name}"], name, shared_bytes
        self._run.restype = ctypes.c_char_p

    def __call__(self, blocks: int | tuple[int, int, int], threads: int, *arguments) -> None:
        grid = (blocks, 1, 1) if isinstance(blocks, int) else blocks
        if nvrtc.recording.launches is not None:
            nvrtc.recording.launches.append(nvrtc.Launch(self, grid, threads, arguments))
        storages = [x.untyped_storage() for x in arguments if isinstance(x, torch.Tensor)]
        copies = {storage.data_ptr(): _Guarded(storage) for storage in storages}
        values = [
            copies[x.untyped_storage().data_ptr()].address
            + x.data_ptr()
            - x.untyped_storage().data_ptr()
            if isinstance(x, torch.Tensor)
            else x
            for x in arguments
        ]
        wrong = self._run(
            *((ctypes.c_int * 3)(*grid), threads, self._shared_bytes),
            (ctypes.c_longlong * len(values))(*values),
        )
        assert not wrong, f"{self._name}: {wrong.decode()}"
        for copy in copies.values():
            copy.back()

    def prepared(self, x, y, z, threads, values, count):
        """A launch at given addresses, as a replay makes it: without pages that guard tensors."""
        given = (ctypes.c_int * 3)(x, y, z), threads, self._shared_bytes, ctypes.c_void_p(values)
        return nvrtc.Prepared(None, lambda: self._run(*given), None)


class _Guarded:
    """A copy of a tensor's memory that ends at a page without access."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._at, self._bytes, page = storage.data_ptr(), storage.nbytes(), mmap.PAGESIZE
        room = -(-self._bytes // page) * page
        self._pages = mmap.mmap(-1, room + page)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._pages))
        ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + room), page, 0)
        self.address = start + room - -(-self._bytes // 16) * 16
        ctypes.memmove(self.address, self._at, self._bytes)

    def back(self) -> None:
        ctypes.memmove(self._at, self.address, self._bytes)
