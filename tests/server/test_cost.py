"""What HTTP costs a token: detokenizing, framing, figures and sending, as processor time of the event loop's thread.

`python -m tests.server.test_cost` prints it and its profile. It is off the step's path: the engine's thread waits for
none of it.
"""

import asyncio
import cProfile
import pstats
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.server.conftest import with_tok_b
from tests.server.serving import CHAT, local_server, until

STREAMS, TOKENS = 16, 400
STEP_SECONDS = 0.004
"""How long a step keeps the engine's thread waiting, as for a GPU, while the event loop's has the interpreter for itself."""
CLIENT = """
import socket, sys, json, selectors
port, streams, path, tokens = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
body = json.dumps({"messages": [{"role": "user", "content": "A"}], "max_tokens": tokens, "stream": True}).encode()
head = f"POST {path} HTTP/1.1\\r\\nHost: x\\r\\nContent-Length: {len(body)}\\r\\nConnection: close\\r\\n\\r\\n".encode()
selector = selectors.DefaultSelector()
for _ in range(streams):
    sock = socket.create_connection(("127.0.0.1", port))
    sock.sendall(head + body)
    selector.register(sock, selectors.EVENT_READ)
left, events = streams, 0
while left:
    for key, _ in selector.select():
        data = key.fileobj.recv(1 << 16)
        events += data.count(b"data: ")
        if not data:
            selector.unregister(key.fileobj)
            left -= 1
print(events)
"""


def cost_us(model, profile=None):
    """Microseconds of the event loop's thread for each token of sixteen chats at once: its own, and in system calls."""
    with local_server(model, max_slots=STREAMS, max_len=512) as server:
        used, step = {}, server.engine.step
        server.engine.step = lambda: time.sleep(STEP_SECONDS) or step()

        async def note(name):
            spent = resource.getrusage(resource.RUSAGE_THREAD)
            used[name] = spent.ru_utime, spent.ru_stime
            if profile is not None:
                (profile.enable if name == "before" else profile.disable)()

        command = [sys.executable, "-c", CLIENT, str(server.port), str(STREAMS), CHAT, str(TOKENS)]
        asyncio.run_coroutine_threadsafe(note("before"), server.loop).result()
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=280)
        asyncio.run_coroutine_threadsafe(note("after"), server.loop).result()
        until(lambda: not server.engine.has_work)
    assert int(done.stdout) == STREAMS * (TOKENS + 1)
    return [1e6 * (after - before) / (STREAMS * TOKENS) for before, after in zip(used["before"], used["after"], strict=True)]


def test_a_token_costs_the_event_loop_little(tmp_path):
    """A guard against work that grows with answer or streams, at ten times the bound of 150 us: machines differ."""
    assert sum(cost_us(with_tok_b(tmp_path / "m", lambda token: 65))) < 1500


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        made = with_tok_b(Path(folder) / "m", lambda token: 65)
        own, system = cost_us(made)
        print(f"{own + system:.0f} us a token, {STREAMS} streams: {own:.0f} its own, {system:.0f} in system calls")
        profile = cProfile.Profile()
        cost_us(made, profile)
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)
