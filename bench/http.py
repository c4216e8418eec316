"""Owns `bench http`: a server's streams as a client sees them, timed at the socket and counted by the server's usage.

Knows OpenAI's API alone and no server of ours. Tokens are never counted by events or by tokenizing text again.
"""

import asyncio
import json
import platform
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from bench.output import Output, Report
from bench.samples import METHOD, P99_NEEDS, summary
from runtime.errors import ConfigError

IDS = range(33, 127)
"""Prompt ids: every model has them, and prompts of them hardly begin alike."""
RUN = random.SystemRandom().getrandbits(64)
TIMEOUT_SECONDS = 600.0
UNREADABLE = (AttributeError, LookupError, TypeError, ValueError)
"""What reading an answer raises that is not of OpenAI's shape."""
FORMULAS = {
    "ttft_ms": "request sent to the first event with text",
    "itl_ms": "gap between two events with text, over the tokens that an event carries on average",
    "tpot_ms": "(last event - first event with text) / tokens behind the first event",
    "output_tok_s": "tokens by the server's usage, over all requests / time from the first request to the last answer",
}


@dataclass(frozen=True)
class HttpOptions:
    """The flags of `bench http`."""

    url: str
    model: str | None
    api_key: str | None
    requests: int
    warmup: int
    concurrency: int
    prompt_len: int
    gen_len: int
    output: Output
    flags: dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """One stream. Times in seconds since the request was sent.

    Attributes:
        events: when each event with text came.
        tokens: by the server's usage.
    """

    events: tuple[float, ...]
    tokens: int

    @property
    def tokens_per_event(self) -> float:
        return self.tokens / len(self.events)

    @property
    def gaps(self) -> list[float]:
        """Seconds between tokens; averaged within an event where events carry several."""
        return [(b - a) / self.tokens_per_event for a, b in zip(self.events, self.events[1:], strict=False)]

    @property
    def tpot(self) -> float:
        return (self.events[-1] - self.events[0]) / (self.tokens - self.tokens_per_event)


class Failure(Exception):
    """A stream that did not do what was asked."""


async def ask(client: httpx.AsyncClient, body: dict[str, Any], clock: Any = time.perf_counter) -> Answer:
    """Play one request.

    Raises:
        Failure: a refusal, an error in the stream, no usage, or another number of tokens than asked for.
    """
    events: list[float] = []
    tokens, ended = None, False
    start = clock()
    try:
        async with client.stream("POST", "completions", json=body) as response:
            if response.status_code != 200:
                raise Failure(f"status {response.status_code}: {(await response.aread()).decode(errors='replace')[:200]}")
            async for line in response.aiter_lines():
                now = clock()
                if not line.startswith("data:"):
                    continue
                data = line.removeprefix("data:").strip()
                if data == "[DONE]":
                    ended = True
                    break
                event = json.loads(data)
                if "error" in event:
                    raise Failure(f"an error in the stream: {event['error']}")
                if any(_text(choice) for choice in event["choices"]):
                    events.append(now - start)
                tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    except (httpx.HTTPError, *UNREADABLE) as error:
        raise Failure(f"{type(error).__name__}: {error}") from error
    if not ended or tokens is None or len(events) < 2:
        raise Failure(f"the stream has {len(events)} events with text, usage {tokens}, and {'an' if ended else 'no'} end")
    if tokens != body["max_tokens"]:
        raise Failure(f"{tokens} tokens came and {body['max_tokens']} were asked for")
    return Answer(tuple(events), tokens)


def _text(choice: dict[str, Any]) -> str:
    return choice.get("text") or (choice.get("delta") or {}).get("content") or ""


async def play(options: HttpOptions) -> tuple[dict[str, Any], list[Answer], list[str], float]:
    """Send all requests, `concurrency` at once; what the server says of itself, answers, failures, and the seconds it took.

    Raises:
        ConfigError: there is no such server.
    """
    base = options.url.rstrip("/").removesuffix("/v1") + "/v1/"
    try:
        sound = 0 < (httpx.URL(base).port or 80) < 65536
    except (httpx.InvalidURL, UnicodeError):
        sound = False
    if not sound:
        raise ConfigError(f"--url {options.url!r} is no URL; give one such as http://127.0.0.1:8000")
    if not (options.model or "").isprintable():
        raise ConfigError(f"--model {options.model!r} is no text; give a name that the server lists")
    if not all("!" <= each <= "~" for each in options.api_key or ""):
        raise ConfigError("--api-key holds a space or another character that no bearer token can")
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    limits = httpx.Limits(max_connections=options.concurrency, max_keepalive_connections=options.concurrency)
    async with httpx.AsyncClient(base_url=base, headers=headers, timeout=TIMEOUT_SECONDS, limits=limits) as client:
        server = await _server(client, options)
        sent = f"{options.requests} requests, {options.concurrency} at once, behind {options.warmup} uncounted"
        shape = f"{options.prompt_len} prompt tokens of random ids, {options.gen_len} answer tokens, greedy, no end ids"
        options.output.begin(f"bench http: {server['model']} at {options.url}", [sent, shape])
        failures: list[str] = []

        async def work(numbers: Iterator[int], answers: list[Answer]) -> None:
            for number in numbers:
                try:
                    answers.append(await ask(client, _body(options, server["model"], number)))
                    if number >= options.warmup and len(answers) % max(1, options.requests // 10) == 0:
                        options.output.say(f"{len(answers)} of {options.requests} answers")
                except Failure as failure:
                    failures.append(str(failure))
                    options.output.say(f"failed: {failure}")

        async def all_of(first: int, count: int) -> list[Answer]:
            answers: list[Answer] = []
            numbers = iter(range(first, first + count))
            await asyncio.gather(*(work(numbers, answers) for _ in range(options.concurrency)))
            return answers

        await all_of(0, options.warmup)
        start = time.perf_counter()
        return server, await all_of(options.warmup, options.requests), failures, time.perf_counter() - start


async def _server(client: httpx.AsyncClient, options: HttpOptions) -> dict[str, Any]:
    try:
        listed = await client.get("models")
        if listed.status_code == 401:
            raise ConfigError(f"{options.url} asks for an API key; give its own with --api-key")
        listed.raise_for_status()
        models = listed.json()["data"]
        model = options.model or models[0]["id"]
        room = next((each.get("max_model_len") for each in models if each["id"] == model), None)
        short = room is not None and options.prompt_len + options.gen_len > room
    except (httpx.HTTPError, *UNREADABLE) as error:
        reason = str(error).split("\n")[0]
        raise ConfigError(f"{options.url} does not answer as a server of OpenAI's API: {reason}; check --url") from None
    if short:
        raise ConfigError(
            f"--prompt-len {options.prompt_len} and --gen-len {options.gen_len} do not fit the {room} positions of {model}; "
            "lower one of them"
        )
    return {"model": model, "runtime": await _runtime(client)}


async def _runtime(client: httpx.AsyncClient) -> Any:
    """What a server of ours says of its mode; None from another one, whatever it answers there."""
    try:
        return (await client.get("runtime")).raise_for_status().json()
    except (httpx.HTTPError, ValueError):
        return None


def _body(options: HttpOptions, model: str, number: int) -> dict[str, Any]:
    """Each prompt differs from all others, of earlier runs too, from its first ids on: none may be answered out of a cache."""
    return {
        "model": model,
        "prompt": random.Random(f"{RUN} {number}").choices(IDS, k=options.prompt_len),
        "max_tokens": options.gen_len,
        "min_tokens": options.gen_len,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def run(options: HttpOptions) -> int:
    """Measure and report; exit code 1 if a request failed."""
    server, answers, failures, seconds = asyncio.run(play(options))
    result = result_of(options, server, answers, failures, seconds)
    ranks = ("mean", "p50", "p90", "p99", "max", "n")
    rows = [{"": name, **{rank: result[f"{rank}_{name}"] for rank in ranks}} for name in ("ttft_ms", "itl_ms", "tpot_ms")]
    footnotes = [f"{name}: {formula}" for name, formula in {**FORMULAS, "percentiles": METHOD}.items()]
    footnotes.append(f"{result['output_tok_s']:.1f} tok/s, {len(answers)} answers, {len(failures)} failed")
    if result["averaged"]:
        footnotes.append(f"events carry {result['tokens_per_event']:.2f} tokens on average: itl_ms is averaged within them")
    few = [row[""] for row in rows if row["n"] < P99_NEEDS]
    footnotes += [f"p99 of {', '.join(few)} is of fewer than {P99_NEEDS} samples"] if few else []
    options.output.end(Report(result, {"Streams": rows}, footnotes))
    return 1 if failures else 0


def result_of(
    options: HttpOptions, server: dict[str, Any], answers: Sequence[Answer], failures: Sequence[str], seconds: float
) -> dict[str, Any]:
    """Statistics under vLLM's key names, and the raw samples."""
    ttft_ms = [1e3 * answer.events[0] for answer in answers]
    itl_ms = [1e3 * gap for answer in answers for gap in answer.gaps]
    tokens, events = sum(answer.tokens for answer in answers), sum(len(answer.events) for answer in answers)
    return {
        "bench": "http",
        "environment": {
            "url": options.url,
            "python": platform.python_version(),
            "httpx": httpx.__version__,
            "flags": {**options.flags, "api_key": None},
            **server,
        },
        "completed": len(answers),
        "failed": len(failures),
        "failures": list(failures),
        "seconds": seconds,
        "request_throughput": len(answers) / seconds,
        "output_tok_s": tokens / seconds,
        "tokens": tokens,
        "tokens_per_event": tokens / events if events else None,
        "averaged": tokens != events,
        **summary("ttft_ms", ttft_ms),
        **summary("itl_ms", itl_ms),
        **summary("tpot_ms", [1e3 * answer.tpot for answer in answers]),
        "formulas": FORMULAS,
        "percentiles": METHOD,
        "measured": {"ttft_ms": ttft_ms, "itl_ms": itl_ms},
        "raw": {"events": [answer.events for answer in answers], "tokens": [answer.tokens for answer in answers]},
    }
