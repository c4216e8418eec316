"""Misuse by the thousand: fuzzed bodies, and a soak of right, cancelled and malformed requests at once.

Tests play short forms; `python -m tests.server.abuse fuzz` and `... soak` (`make fuzz`, `make soak`) the long ones, against a
server process with a model of known answers.
"""

import asyncio
import http.client
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.server.conftest import alphabet, with_tok_b
from tests.server.processes import Process, server_process
from tests.server.serving import (
    CHAT,
    RUNTIME,
    TEXT,
    parse_events,
    raw_request,
    read_until,
    strict,
    until,
)

JSON_TYPE = {"content-type": "application/json"}
SAY = {"messages": [{"role": "user", "content": "a"}]}
BASES: tuple[tuple[str, dict[str, Any]], ...] = (
    (TEXT, {"prompt": "a", "max_tokens": 3, "temperature": 0.5, "seed": 1, "stop": ["q"], "logit_bias": {"98": 1}}),
    (TEXT, {"prompt": [97], "max_tokens": 3, "logprobs": 2, "echo": True, "n": 2, "stream": True}),
    (CHAT, {**SAY, "max_tokens": 3, "top_p": 0.5, "top_k": 3, "logprobs": True, "top_logprobs": 2}),
    (CHAT, {**SAY, "stream": True, "stream_options": {"include_usage": True}, "min_p": 0.1, "presence_penalty": 1}),
    ("/tokenize", {"prompt": "abc", "add_special_tokens": False}),
    ("/detokenize", {"tokens": [97, 98]}),
    (RUNTIME, {"ops": "unfused", "graph": "off"}),
)
ODD = (
    *("null", "true", "NaN", "-Infinity", "1e999", "-1", "0", "1.5", "9" * 400, "18446744073709551616", '""', '"\\ud83c"'),
    *(
        '"\\u0000"',
        '"<|im_end|>"',
        "[]",
        "{}",
        "[[]]",
        "[null]",
        "[-1]",
        "[1e2]",
        '{"a":{}}',
        "[" * 2000,
        '"' + "a" * 9000 + '"',
    ),
)
"""Values as JSON writes them, and as it does not."""


def fuzzed(rng: random.Random) -> tuple[str, bytes]:
    """A path and a body that was once right."""
    path, fields = rng.choice(BASES)
    body = {key: json.dumps(value) for key, value in fields.items() if rng.random() < 0.9}
    for _ in range(rng.randrange(3)):
        body[rng.choice([*fields, "model", "user", "tools", "n", "stop_token_ids", "min_tokens"])] = rng.choice(ODD)
    data = bytearray("{" + ",".join(f'"{key}":{value}' for key, value in body.items()) + "}", "utf-8")
    for _ in range(rng.choice((0, 0, 1, 4)) if data else 0):
        at = rng.randrange(len(data))
        match rng.randrange(4):
            case 0:
                data[at] = rng.randrange(256)
            case 1:
                del data[at : at + rng.randrange(1, 20)]
            case 2:
                data[at:at] = data[: rng.randrange(30)]
            case _:
                data[at:at] = rng.randbytes(rng.randrange(1, 5))
        data = data or bytearray(b" ")
    return path, bytes(data)


def fuzz(port: int, count: int, seed: int = 0) -> Counter[int]:
    """Send fuzzed bodies one after the other; how often each status came.

    Raises:
        AssertionError: a 5xx, or an error that is not small strict JSON in the API's form.
    """
    rng, seen = random.Random(seed), Counter[int]()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    for _ in range(count):
        path, body = fuzzed(rng)
        connection.request("POST", path, body, JSON_TYPE)
        response = connection.getresponse()
        told = response.read()
        assert response.status < 500, (path, body, told)
        if response.status >= 400:
            assert strict(told)["error"]["message"], (path, body, told)
            assert len(told) < 10_000, (path, body)
        elif response.headers["content-type"].startswith("text/event-stream"):
            parse_events(told)
        else:
            strict(told)
        seen[response.status] += 1
    connection.close()
    return seen


MALFORMED = (
    raw_request(TEXT, b'{"prompt": "a"'),
    raw_request(TEXT, b'{"prompt": "a", "temperature": NaN}'),
    raw_request(TEXT, b'{"prompt": [-1]}'),
    raw_request(CHAT, b'{"messages": 5}'),
    raw_request(CHAT, b'{"messages": [], "model": "nope"}'),
    raw_request(TEXT, b"", method="GET"),
    raw_request("/nowhere", b""),
    raw_request(TEXT, b"{}", length="abc"),
    b"GARBAGE\r\n\r\n",
)


async def soak(port: int, count: int, at_once: int = 64, seed: int = 0) -> Counter[str]:
    """Play `count` requests: a tenth malformed, a third cancelled at random moments, the rest checked for their known answer.

    Raises:
        AssertionError: an answer that is not right, or a malformed request that was not refused.
    """
    rng, seen, numbers = random.Random(seed), Counter[str](), iter(range(count))

    async def client() -> None:
        for number in numbers:
            kind = "malformed" if number % 10 == 0 else "cancelled" if number % 3 == 0 else "right"
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                if kind == "malformed":
                    writer.write(rng.choice(MALFORMED))
                    status = await asyncio.wait_for(reader.readline(), 60)
                    assert status.split()[1].startswith(b"4"), status
                elif kind == "cancelled":
                    fields = {"prompt": "A", "max_tokens": 400, "stream": rng.random() < 0.7}
                    writer.write(raw_request(TEXT, json.dumps(fields).encode()))
                    await asyncio.sleep(rng.choice((0, 0.005, 0.03, 0.1)))
                else:
                    await right(rng, reader, writer)
                seen[kind] += 1
            finally:
                writer.transport.abort()

    await asyncio.gather(*(client() for _ in range(at_once)))
    return seen


async def right(rng: random.Random, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One request whose answer is known, streamed or not."""
    start, tokens, stream, stop = rng.randrange(97, 110), rng.randrange(1, 9), rng.random() < 0.5, rng.random() < 0.2
    expected = "".join(chr(start + i + 1) for i in range(tokens))
    fields = {"prompt": chr(start), "max_tokens": tokens, "stream": stream, "temperature": 0.5}
    if stop:
        fields["stop"] = expected[-1]
        expected = expected[:-1]
    writer.write(raw_request(TEXT, json.dumps(fields).encode(), headers="Connection: close\r\n"))
    head, _, body = (await asyncio.wait_for(reader.read(), 120)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), (head, body)
    if stream:
        parts = re.findall(rb"data: (\{.*\})", body)
        assert body.count(b"data: [DONE]") == 1
        found = "".join(json.loads(part)["choices"][0]["text"] for part in parts)
    else:
        found = json.loads(body[body.index(b"{") : body.rindex(b"}") + 1])["choices"][0]["text"]
    assert found == expected, (fields, found)


def figures(server: Process) -> dict[str, float]:
    """What the server holds: memory in bytes, file descriptors, requests in it."""
    text = server.http.get("/metrics").text
    names = ("process_resident_memory_bytes", "process_open_fds", "num_requests_running", "num_requests_waiting")
    return {name: float(re.search(rf"^(?:quartet:)?{name}(?:{{.*}})? (\S+)", text, re.MULTILINE).group(1)) for name in names}


def settled(server: Process) -> dict[str, float]:
    """The figures once nothing runs."""
    until(lambda: sum(list(figures(server).values())[2:]) == 0)
    time.sleep(0.5)
    return figures(server)


def main_fuzz(server: Process, count: int) -> None:
    print(f"{count} fuzzed bodies: {dict(fuzz(server.port, count))}", flush=True)
    examples = str(count // 31)  # of each operation, in three phases: with 322 some 5,100 requests
    url = f"http://127.0.0.1:{server.port}/openapi.json"
    command = [
        "schemathesis",
        "run",
        url,
        "--checks",
        "not_a_server_error",
        "--max-examples",
        examples,
        "--request-timeout",
        "60",
    ]
    subprocess.run([str(Path(sys.executable).parent / command[0]), *command[1:]], check=True)
    assert server.text("a", max_tokens=3, temperature=0) == "bcd"
    assert server.stop() == 0


def main_soak(server: Process, count: int) -> None:
    asyncio.run(soak(server.port, count // 20, seed=1))
    before = settled(server)
    began = time.monotonic()
    print(f"{dict(asyncio.run(soak(server.port, count)))} in {time.monotonic() - began:.0f} s")
    after = settled(server)
    print(f"before {before}\nafter  {after}", flush=True)
    assert after["process_open_fds"] <= before["process_open_fds"] + 2
    assert after["process_resident_memory_bytes"] <= before["process_resident_memory_bytes"] + (32 << 20)
    streams = [server.send(TEXT, prompt="A", max_tokens=400, stream=True, n=1 + i % 3) for i in range(64)]
    until(lambda: figures(server)["num_requests_running"] == 8)
    server.popen.send_signal(signal.SIGTERM)
    ends = [read_until(sock, lambda data: b"[DONE]" in data or b"not_serving" in data) for sock in streams]
    drained = sum(b'"finish_reason":"length"' in end for end in ends)
    print(f"SIGTERM among 64 streams: {drained} drained, {sum(b'not_serving' in end for end in ends)} told")
    assert all(b'"finish_reason":"length"' in end or b"not_serving" in end for end in ends)
    assert server.popen.wait(20) == 0


def main() -> None:
    name, count = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else {"fuzz": 10_000, "soak": 20_000}[sys.argv[1]]
    with tempfile.TemporaryDirectory() as folder:
        model = with_tok_b(Path(folder) / "m", alphabet, max_position_embeddings=512)
        with server_process(model, "--log-level", "error", "--shutdown-timeout", "5") as server:
            {"fuzz": main_fuzz, "soak": main_soak}[name](server, count)


if __name__ == "__main__":
    main()
