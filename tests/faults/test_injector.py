"""Faults at file-system calls: kills, a full disk, I/O errors; and the fault injector itself.

A killed and continued command ends with the bytes of an undisturbed one. An error ends in one
sentence with the file's name and loses nothing; a tolerated error does not change what is written.
With DLRNN_FAULTS=all a fault is injected at every call, otherwise at a few of them.
"""

import errno
import shutil
import signal
import subprocess
import sys

import pytest
from injector import ERRORS, FLAGS, MODES, SOURCE, WORKLOADS, check, chosen, shared_server

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="glibc's LD_PRELOAD")


@pytest.mark.parametrize("mode", MODES[1:])
@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_fault_loses_nothing(workload, mode, case):
    for n in chosen(workload, mode):
        with case(f"{mode} at call {n}"):
            check(workload, mode, n)


# ---------------------------------------------------------------------------------- the injector

WRITES = """
import os
for name in ("a", "b"):
    handle = os.open(name, os.O_WRONLY | os.O_CREAT)
    os.write(handle, b"0123456789")
    os.fsync(handle)
    os.close(handle)
"""  # six calls: open, write, fsync; twice

CAUGHT = """
import json
try:
    {code}
except OSError as error:
    print(json.dumps([error.errno, str(error.filename)]))
else:
    print("null")
"""


@pytest.fixture
def run(tmp_path):
    """Run code in a folder below which faults are injected."""
    root = tmp_path / "root"
    root.mkdir()

    def run(code, mode="count", n=0):
        code = f"import os; os.chdir({str(root)!r})\n{code}"
        return shared_server().run(["-c", code], root, mode, n), root

    return run


def content(root):
    return {path.name: path.read_bytes() for path in root.iterdir()}


def test_calls_below_the_root_are_counted(run, tmp_path):
    code = f"{WRITES}\nopen({str(tmp_path / 'elsewhere')!r}, 'w').write('x')"
    outcome, root = run(code)
    assert (outcome.status, outcome.stderr, outcome.where) == (0, "", [])
    assert [call.name for call in outcome.calls] == ["open", "write", "fsync"] * 2
    assert [call.path for call in outcome.calls] == [root / "a"] * 3 + [root / "b"] * 3


@pytest.mark.parametrize(
    ("mode", "n", "left"),
    [
        ("kill before", 1, {}),
        ("kill after", 1, {"a": b""}),
        ("kill before", 2, {"a": b""}),
        ("torn write", 2, {"a": b"01234"}),
        ("kill after", 2, {"a": b"0123456789"}),
        ("kill before", 5, {"a": b"0123456789", "b": b""}),
        ("torn write", 5, {"a": b"0123456789", "b": b"01234"}),
        ("kill after", 6, {"a": b"0123456789", "b": b"0123456789"}),
    ],
)
def test_kill_leaves_the_calls_before_it_done(run, mode, n, left):
    outcome, root = run(WRITES, mode, n)
    assert outcome.status == -signal.SIGKILL
    assert content(root) == left
    assert len(outcome.calls) == n
    assert outcome.where == [outcome.calls[-1]]


def test_a_call_that_is_never_reached_kills_nothing(run):
    outcome, root = run(WRITES, "kill before", 7)
    assert outcome.status == 0
    assert len(content(root)) == 2


@pytest.mark.parametrize(
    ("code", "n", "name"),
    [
        ("open('new', 'w')", 1, "new"),
        ("os.write(os.open('new', os.O_WRONLY | os.O_CREAT), b'x')", 2, None),
        ("os.mkdir('new')", 1, "new"),
        ("os.fsync(os.open('.', os.O_RDONLY))", 2, None),
        ("os.truncate('there', 5)", 1, "there"),
        ("os.rename('there', 'new')", 1, "there"),
        ("os.symlink('there', 'new')", 1, "there"),
    ],
)
@pytest.mark.parametrize("mode", ERRORS)
def test_errors_reach_python(run, mode, code, n, name):
    outcome, root = run("open('there', 'w').close()\n" + CAUGHT.format(code=code), mode, n + 1)
    number = errno.ENOSPC if mode == "ENOSPC" else errno.EIO
    expected = f'[{number}, "{name}"]\n'
    assert (outcome.stdout, outcome.stderr) == (expected, ""), outcome
    assert len(outcome.where) == 1
    assert set(content(root)) <= {"there", "new"}


@pytest.mark.parametrize(
    ("code", "n"),
    [
        ("open('there')", 1),
        ("os.read(os.open('there', os.O_RDONLY), 1)", 2),
        ("os.pread(os.open('there', os.O_RDONLY), 1, 0)", 2),
        ("os.read(os.dup(os.open('there', os.O_RDONLY)), 1)", 2),
        ("os.unlink('there')", 1),
        ("os.unlink('there', dir_fd=os.open('.', os.O_RDONLY))", 2),
        ("os.listdir('.')", 1),
    ],
)
def test_a_full_disk_can_still_be_read_and_a_broken_one_not(run, code, n):
    code = "open('there', 'w').close()\n" + CAUGHT.format(code=code)
    broken, root = run(code, "EIO", n + 1)
    assert broken.stdout.startswith(f"[{errno.EIO}, ")
    assert [call.faulty for call in broken.calls] == [k == n for k in range(n + 1)]
    shutil.rmtree(root)
    root.mkdir()
    full, _ = run(code, "ENOSPC", 2)
    assert (full.stdout, full.where) == ("null\n", [])


def test_a_full_disk_stays_full_and_a_broken_one_does_not(run):
    code = "".join(CAUGHT.format(code=f"open('{name}', 'w')") for name in "ab")
    full, root = run(code, "ENOSPC", 1)
    assert full.stdout == '[28, "a"]\n[28, "b"]\n'
    assert [call.path.name for call in full.where] == ["a", "b"]
    assert content(root) == {}
    broken, _ = run(code, "EIO", 1)
    assert broken.stdout == '[5, "a"]\nnull\n'


def test_paths_through_links_and_dots_are_resolved(run, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "root")
    paths = (tmp_path / "link" / "x", tmp_path / "root" / ".." / "root" / "x", "./x", "x")
    outcome, root = run("".join(f"open({str(path)!r}, 'a').close()\n" for path in paths))
    assert [call.path for call in outcome.calls] == [root / "x"] * 4


def test_a_traceback_and_its_status_are_reported(run):
    outcome, _ = run("raise SystemExit(3)")
    assert outcome.status == 3
    outcome, _ = run("raise ZeroDivisionError")
    assert outcome.status == 1
    assert "Traceback" in outcome.stderr


def test_a_trial_that_hangs_is_ended(tmp_path):
    server = shared_server()
    with pytest.raises(TimeoutError, match="not done after"):
        server.run(["-c", "import time; time.sleep(600)"], tmp_path, seconds=0.2)
    assert server.run(["-c", "print(1)"], tmp_path).stdout == "1\n"


@pytest.mark.parametrize("compiler", ["gcc", "g++"])
def test_c_and_cpp_compilers_accept_the_source_without_a_warning(compiler, tmp_path):
    if shutil.which(compiler) is None:
        pytest.skip(f"there is no {compiler}")
    strict = ["-Wall", "-Wextra", "-Werror", "-Wno-format-truncation"]
    subprocess.run([compiler, SOURCE, "-o", tmp_path / "x.so", *FLAGS, *strict], check=True)
