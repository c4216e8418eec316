"""Owns one question: what does serving cost? `python -m bench.served MODEL` starts servers and measures them as a client does.

Inter-token times of one and of eight streams beside the engine's own, /health during a long prefill, a chat's second turn, and
streams whose mode is changed. Prompts are ids, so random weights do. Does not import the server and asserts no time.
"""

import asyncio
import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from bench.samples import percentile

GEN = 256
CHAT, TURN, LONG = 8192, 64, 16384
ASK = {"temperature": 0, "ignore_eos": True}


@contextmanager
def served(model: str, *flags: str) -> Iterator[str]:
    """The URL of a server process, ready."""
    command = [sys.executable, "-m", "server", "--model", model, "--port", "0", "--log-level", "warning", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            found = (re.search(r"on (http://[^/\s]+)", line) for line in server.stdout)
            url = next(match.group(1) for match in found if match)
            while httpx.get(f"{url}/health").status_code != 200:
                time.sleep(0.2)
            yield url
        finally:
            server.terminate()


def command(*arguments: str) -> dict[str, Any]:
    """The JSON of a bench command."""
    done = subprocess.run(
        [sys.executable, "-m", "bench", *arguments, "-o", "json"], stdout=subprocess.PIPE, text=True, check=True
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(found, dict)
    return found


def engine_step_ms(model: str) -> dict[str, dict[str, float]]:
    """The engine's own inter-token times at the prompt and answer lengths that `bench http` sends."""
    shape = ("--batch", "1,8", "--prompt-len", "128", "--gen-len", str(GEN), "--reps", "3", "--no-counts")
    cells = command("latency", "--model", model, *shape)["cells"]
    return {f"engine_{cell['batch']}": {rank: cell[f"{rank}_itl_ms"] for rank in ("p50", "p99")} for cell in cells}


def ids(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(33, 127), k=count)


def complete(url: str, prompt: list[int], tokens: int) -> dict[str, Any]:
    """A whole answer; its text, of a model without a tokenizer, is its ids."""
    reply = httpx.post(f"{url}/v1/completions", json={**ASK, "prompt": prompt, "max_tokens": tokens}, timeout=600)
    reply.raise_for_status()
    found = reply.json()
    assert isinstance(found, dict)
    return found


def first_token_ms(url: str, prompt: list[int]) -> tuple[float, int]:
    """From the request to its one token, and how many of the prompt's tokens were cached."""
    start = time.perf_counter()
    usage = complete(url, prompt, 1)["usage"]
    return 1e3 * (time.perf_counter() - start), usage["prompt_tokens_details"]["cached_tokens"]


async def health_ms(url: str) -> list[float]:
    """How long /health takes, again and again while a long prompt is computed."""
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        await client.get("/health")
        body = {**ASK, "prompt": ids(LONG, 1), "max_tokens": 1}
        prefill = asyncio.create_task(client.post("/v1/completions", json=body))
        taken = []
        while not prefill.done():
            start = time.perf_counter()
            (await client.get("/health")).raise_for_status()
            taken.append(1e3 * (time.perf_counter() - start))
            await asyncio.sleep(0.005)
        (await prefill).raise_for_status()
        return taken


async def texts(url: str, modes: list[dict[str, str]]) -> list[str]:
    """Four streams at once; meanwhile the mode is changed every 0.2 seconds, in turn, if there are modes."""
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        bodies = [{**ASK, "prompt": ids(64, 10 + i), "max_tokens": 2 * GEN} for i in range(4)]
        asked = asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
        turn = 0
        while modes and not asked.done():
            (await client.post("/v1/runtime", json=modes[turn % len(modes)])).raise_for_status()
            turn += 1
            await asyncio.sleep(0.2)
        return [reply.json()["choices"][0]["text"] for reply in await asked]


def second_turn(model: str, url: str, flags: tuple[str, ...]) -> dict[str, Any]:
    """First-token times of a chat's two turns, and whether the second's text is that of a server that reuses nothing."""
    complete(url, ids(CHAT, 2), 1)  # warm
    first, _ = first_token_ms(url, ids(CHAT, 3))
    answer = [int(word) for word in complete(url, ids(CHAT, 3), TURN)["choices"][0]["text"].split()]
    prompt = ids(CHAT, 3) + answer + ids(32, 4)
    second, cached = first_token_ms(url, prompt)
    text = complete(url, prompt, TURN)["choices"][0]["text"]
    with served(model, *flags, "--no-prefix-reuse", "--max-slots", "1") as fresh:  # both must fit the GPU
        same = complete(fresh, prompt, TURN)["choices"][0]["text"] == text
    return {"first_ms": first, "second_ms": second, "share": second / first, "cached": cached, "same_text": same}


def main(model: str) -> None:
    flags = ("--max-len", str(LONG + 2 * TURN), "--warm", "all")
    result: dict[str, Any] = {"bench": "served", "model": model, **engine_step_ms(model)}
    with served(model, *flags) as url:
        for streams in (1, 8):
            sent = ("--requests", str(8 * streams), "--concurrency", str(streams), "--gen-len", str(GEN))
            found = command("http", "--url", url, *sent)
            result[f"http_{streams}"] = {rank: found[f"{rank}_itl_ms"] for rank in ("p50", "p99")}
        taken = asyncio.run(health_ms(url))
        result["health_in_prefill_ms"] = {"n": len(taken), "p50": percentile(taken, 50), "max": max(taken)}
        modes = [m for m in httpx.get(f"{url}/v1/runtime").json()["modes"] if m["available"]]
        plain = asyncio.run(texts(url, []))
        switched = asyncio.run(texts(url, [{"ops": mode["ops"], "graph": mode["graph"]} for mode in modes]))
        agreed = [
            next((i for i, (x, y) in enumerate(zip(a.split(), b.split(), strict=True)) if x != y), None)
            for a, b in zip(plain, switched, strict=True)
        ]
        result["switched"] = {"modes": len(modes), "first_difference_of_each_stream": agreed}
        result["second_turn"] = second_turn(model, url, flags)
    for name, value in result.items():
        print(f"{name}: {value}", file=sys.stderr)
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
