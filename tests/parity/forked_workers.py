"""
Processes that are forked from one that has imported PyTorch, which takes a new one four seconds: workers, and scripts.

Each is a child of the tests' process, as one that it starts itself: its parent ends at once, and the tests' process
takes its orphans meanwhile. What the command line of a worker does is tested where workers are started as usual.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

from cubatch import worker
from cubatch.measure import remote

ROOT = Path(__file__).parents[2]
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of prctl(2)
_THREADS = "OMP_NUM_THREADS"  # read when PyTorch is loaded
_lock, _server = threading.Lock(), []


def _fork(files, **facts):
    """Fork a process with three files as its standard ones, and return its number."""
    facts |= {"parent": os.getpid()}
    with _lock, _taking_orphans():
        channel = _channel()
        socket.send_fds(channel, [json.dumps(facts).encode()], files)
        return int(channel.recv(100))


def run_script(script, folder, environment, arguments):
    """Run a script as `python SCRIPT ARGUMENT...` in a folder does, and return its exit code, output and errors."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err, Path(os.devnull).open() as nothing:
        files = [each.fileno() for each in (nothing, out, err)]
        pid = _fork(files, environment=environment, folder=str(folder), script=[script, *arguments])
        _, status = os.waitpid(pid, 0)
        for file in (out, err):
            file.seek(0)
        return os.waitstatus_to_exitcode(status), out.read(), err.read()


class Forked:
    """As much of `subprocess.Popen` as a `RemoteRunner` needs."""

    def __init__(self, command, *, stderr, env, **_):
        (requests, to_worker), (from_worker, answers) = os.pipe(), os.pipe()
        files = [requests, answers, stderr.fileno()]
        self.pid, self.returncode = _fork(files, environment=env, folder=str(Path.cwd()), script=None), None
        os.close(requests)
        os.close(answers)
        self.stdin, self.stdout = os.fdopen(to_worker, "wb"), os.fdopen(from_worker, "rb")

    def wait(self, timeout):
        """Wait for the end of the process, and set its return code."""
        until = time.monotonic() + timeout
        while self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > until:
                raise subprocess.TimeoutExpired("worker", timeout)
            else:
                time.sleep(0.002)


def start(command, *, env, **options):
    """Start a worker as `subprocess.Popen` does."""
    is_alike = env.get(_THREADS) == os.environ.get(_THREADS)
    return (Forked if is_alike else subprocess.Popen)(command, env=env, **options)


def _channel():
    """Return the socket of the process that forks, which is started once and ends with this one."""
    if not _server:
        channel, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-P", "-c", "from tests.parity import forked_workers; forked_workers.serve()"]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        options = {"stdout": subprocess.DEVNULL, "env": environment, "start_new_session": True}
        with other:
            server = subprocess.Popen(command, stdin=other, **options)
        _server.append(channel)
        atexit.register(server.wait)
        atexit.register(channel.close)  # before it is waited for
    return _server[0]


@contextlib.contextmanager
def _taking_orphans():
    prctl = ctypes.CDLL(None).prctl
    prctl(_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_SUBREAPER, 0, 0, 0, 0)


def serve():
    """Fork a process for each message until the other end is closed."""
    import torch
    from torch._subclasses import FakeTensorMode

    from cubatch.frameworks import module_worker  # noqa: F401 - what a worker imports first

    with FakeTensorMode():  # which imports much
        torch.zeros(1)
    assert len(list(Path("/proc/self/task").iterdir())) == 1  # no thread is there after a fork
    _serve(socket.socket(fileno=0))


def _serve(channel):
    while True:
        message, files, *_ = socket.recv_fds(channel, 1 << 20, 3)
        if not message:
            os._exit(0)
        if not os.fork():
            if not os.fork():
                _work(channel, files, **json.loads(message))
            os._exit(0)
        os.wait()
        for file in files:
            os.close(file)


def _work(channel, files, *, environment, folder, parent, script):
    while os.getppid() != parent:
        time.sleep(0.001)
    os.setsid()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    channel.send(str(os.getpid()).encode())
    channel.detach()
    for place, file in enumerate(files):
        os.dup2(file, place)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = [*environment["PYTHONPATH"].split(os.pathsep), *(path for path in sys.path if path != str(ROOT))]
    os.chdir(folder)
    if script is None:
        sys.argv = ["worker", str(parent)]
        worker.main()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if not os.fork():  # forks the workers of the script
        own.close()
        _serve(other)
    other.close()
    _server.append(own)
    remote.subprocess = SimpleNamespace(**vars(subprocess) | {"Popen": start})
    sys.argv, sys.path[:0] = script, [str(Path(script[0]).absolute().parent)]
    runpy.run_path(script[0], run_name="__main__")
    sys.exit()
