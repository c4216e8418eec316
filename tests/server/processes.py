"""Runs servers for tests as processes of their own."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.server.serving import DEADLINE, Client, until

ROOT = Path(__file__).parent.parent.parent
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}
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

    popen: subprocess.Popen[str]
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


@contextmanager
def server_process(model: Path | str, *flags: str, prelude: str = "") -> Iterator[Process]:
    """A started server process, ended behind the `with` if it still runs."""
    popen = start_server(model, *flags, prelude=prelude)
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
        assert ready.wait(2 * DEADLINE), "".join(output)
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
