"""
Measuring processes that are forked from one that has imported PyTorch, which takes a new one four seconds.

A worker is a child of the tests' process, as one that it starts itself: its parent ends at once, and the tests' process
takes its orphans meanwhile. What its command line and its environment do is tested where workers are started as usual.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from cubatch import worker
from cubatch.measure import remote

_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of prctl(2)
_THREADS = "OMP_NUM_THREADS"  # read when PyTorch is loaded
_lock, _server = threading.Lock(), []


class Forked:
    """As much of `subprocess.Popen` as a `RemoteRunner` needs."""

    def __init__(self, command, *, stderr, env, **_):
        (requests, to_worker), (from_worker, answers) = os.pipe(), os.pipe()
        facts = {"environment": env, "folder": str(Path.cwd()), "parent": os.getpid()}
        with _lock, _taking_orphans():
            channel = _channel()
            socket.send_fds(channel, [json.dumps(facts).encode()], [requests, answers, stderr.fileno()])
            self.pid, self.returncode = int(channel.recv(100)), None
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
        options = {"stdout": subprocess.DEVNULL, "env": remote.own_environment(), "start_new_session": True}
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
    """Fork a worker for each message until the other end is closed."""
    import torch
    from torch._subclasses import FakeTensorMode

    from cubatch.frameworks import module_worker  # noqa: F401 - what a worker imports first

    with FakeTensorMode():  # which imports much
        torch.zeros(1)
    assert len(list(Path("/proc/self/task").iterdir())) == 1  # no thread is there after a fork
    channel = socket.socket(fileno=0)
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


def _work(channel, files, *, environment, folder, parent):
    while os.getppid() != parent:
        time.sleep(0.001)
    os.setsid()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    channel.send(str(os.getpid()).encode())
    channel.detach()
    for place, file in enumerate(files):
        os.dup2(file, place)
        os.close(file)
    before = os.environ["PYTHONPATH"].split(os.pathsep)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = [*environment["PYTHONPATH"].split(os.pathsep), *(path for path in sys.path if path not in before)]
    sys.argv = ["worker", str(parent)]
    os.chdir(folder)
    worker.main()
