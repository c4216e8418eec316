"""Runs servers for tests as processes of their own: `python -m server`, or forks of one that has imported it."""

import json
import os
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from models import find_model, load_tokenizer
from server.__main__ import main
from tests.server.serving import DEADLINE, Client, until

ROOT = Path(__file__).parent.parent.parent
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}
NUMBER = struct.Struct("i")
SLOW = """
import time, runtime.engine, server.dispatch
pause, step, drain = [0.1], runtime.engine.Engine.step, server.dispatch.Dispatcher.drain
runtime.engine.Engine.step = lambda self: time.sleep(pause[0]) or step(self)
server.dispatch.Dispatcher.drain = lambda self, seconds: pause.__setitem__(0, 0.001) or drain(self, seconds)
"""
"""A prelude: steps take so long that no client on a busy machine is overtaken by its answer, until the server drains."""


@dataclass
class Process(Client):
    """A server as a process of its own."""

    popen: "subprocess.Popen[str] | Forked"
    output: list[str]

    def stop(self, seconds: float = DEADLINE) -> int:
        """Ask it to end; its exit code."""
        self.popen.send_signal(signal.SIGTERM)
        return self.popen.wait(seconds)


def start_server(model: Path | str, *flags: str, prelude: str = "") -> subprocess.Popen[str]:
    """`python -m server` on a free port, stdout and stderr in one pipe; `prelude` is Python to run before it."""
    start = ["-c", f"{prelude}\nfrom server.__main__ import main; main()"] if prelude else ["-m", "server"]
    command = [sys.executable, *start, "--model", str(model), "--device", "cpu", "--port", "0", *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENV, cwd=ROOT)


class Forked:
    """What tests use of subprocess.Popen, for a process that `forks` has started."""

    def __init__(self, output: int, status: int) -> None:
        self.stdout, self._status, self.returncode = os.fdopen(output), os.fdopen(status, "rb", 0), None
        self.pid = self._told()

    def _told(self) -> int:
        return NUMBER.unpack(self._status.read(NUMBER.size))[0]

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], 0)[0]:
            self.returncode = self._told()
            self._status.close()
        return self.returncode

    def wait(self, timeout: float = DEADLINE) -> int:
        until(lambda: self.poll() is not None, timeout)
        return self.returncode


@contextmanager
def forks(model: Path | str) -> Iterator[Callable[..., Forked]]:
    """`start_server` by forks of one process that has imported what a server needs, which takes seconds of processor time.

    Args:
        model: whose tokenizer is loaded there, since that imports more.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-m", "tests.server.processes", str(model)]
        mother = subprocess.Popen(command, stdin=theirs, env=ENV, cwd=ROOT)

    def start(model: Path | str, *flags: str, prelude: str = "") -> Forked:
        (output, told), (status, ended) = os.pipe(), os.pipe()
        arguments = ["--model", str(model), "--device", "cpu", "--port", "0", *flags]
        socket.send_fds(ours, [json.dumps([arguments, prelude]).encode()], [told, ended])
        os.close(told)
        os.close(ended)
        return Forked(output, status)

    with ours:
        yield start
    mother.wait(DEADLINE)


def fork() -> None:
    """Fork a server for each message on the socket at stdin, and a process that waits for it."""
    sock = socket.socket(fileno=os.dup(0))
    while message := (received := socket.recv_fds(sock, 1 << 16, 2))[0]:
        output, status = received[1]
        if not os.fork():
            break
        os.close(output)
        os.close(status)
    else:
        return
    if pid := os.fork():
        os.close(output)
        os.write(status, NUMBER.pack(pid))
        os.write(status, NUMBER.pack(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
        os._exit(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    for file in (output, status, sock.detach()):
        os.close(file)
    arguments, prelude = json.loads(message)
    exec(prelude, {})
    sys.argv = ["server", *arguments]
    main()


@contextmanager
def server_process(
    model: Path | str, *flags: str, prelude: str = "", start: Callable[..., "subprocess.Popen[str] | Forked"] = start_server
) -> Iterator[Process]:
    """A started server process, ended behind the `with` if it still runs; `start`: `start_server`, or what `forks` gives."""
    popen = start(model, *flags, prelude=prelude)
    output: list[str] = []
    ready = threading.Event()

    def read() -> None:
        assert popen.stdout is not None
        for line in popen.stdout:
            output.append(line)
            if "Serving" in line:
                ready.set()
        ready.set()

    reader = threading.Thread(target=read)
    reader.start()
    try:
        assert ready.wait(2 * DEADLINE)
        port = re.search(r"on http://127\.0\.0\.1:(\d+)", "".join(output))
        assert port, "".join(output)
        process = Process(int(port.group(1)), popen, output)
        with process.http:
            until(lambda: process.http.get("/health").status_code == 200)
            yield process
    finally:
        if popen.poll() is None:
            popen.kill()
        popen.wait()
        reader.join()
        popen.stdout.close()


if __name__ == "__main__":
    load_tokenizer(find_model(sys.argv[1]))
    fork()
