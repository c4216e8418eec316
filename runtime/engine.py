"""Owns the loop: admit, prefill, decode, sample, commit, emit. Speaks token ids, never text; one thread calls it.

Does not own the model (handed in), the slots' bookkeeping (scheduler), how a step is played (modes) or the draw (sampling).
"""

import math
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from runtime.config import EngineConfig
from runtime.decode_step import Model, pack
from runtime.errors import ContextLengthError, DeviceError, RequestError
from runtime.kv_cache import KVCache
from runtime.modes import Modes, Prepared
from runtime.ops import STATE_WIDTH, Rows, SlotState
from runtime.pinned import Landing, PinnedRing, download
from runtime.request import Logprobs, Request, TokenEvent, require_ids
from runtime.sampling import NOT_FINITE, TOLD_WORDS, Sampler, read_told, tell, variant
from runtime.scheduler import Running, Scheduler

SCORED_ROWS = 64
"""Prompt tokens whose logits exist at once where their log-probabilities are asked for: 39 MB of float32 at 152k ids."""

NOT_FINITE_MESSAGE = "the model's logits are not finite; a float16 run of a bfloat16 checkpoint overflows: use --dtype bfloat16"


@dataclass(frozen=True)
class _Flight:
    """Draws that have been enqueued and not yet read: one for each of `rows`, told in equally many words."""

    rows: list[Running]
    landing: Landing


class Engine:
    """Continuous batching over the slots of one model. Each `step` plays at most one prompt chunk and one decode step of all
    who decode: no stream stands still for longer than a chunk and a step.

    Args:
        model: the decoder; the engine's cache and state live on its device.
        config: settled by `runtime.device.resolve`: no "auto" left, max_len set.

    Raises:
        OutOfMemoryError: the KV cache does not fit.
        ConfigError: no such ops set.
    """

    def __init__(self, model: Model, config: EngineConfig) -> None:
        assert config.max_len is not None
        self.config = config
        self.model = model
        self.max_len = config.max_len
        self.cache = KVCache.allocate(
            model.num_layers, config.max_slots, model.num_kv_heads, self.max_len, model.head_dim, model.dtype, model.device
        )
        self.state = SlotState.allocate(config.max_slots, model.device, model.vocab_size)
        self._sampler = Sampler()
        self._scheduler = Scheduler(config.max_slots, self.max_len, config.prefix_reuse)
        self._slot_of_row = torch.full((config.max_slots,), -1, dtype=torch.int32, device=model.device)
        self.modes = Modes(model, self._sampler, self.cache, self.state, self._slot_of_row, config)
        self._rows: list[Running] = []  # what _slot_of_row says now
        self._last_hidden = [torch.empty(0)] * config.max_slots  # of each slot's prompt, [1, C]
        self._uploads = PinnedRing(STATE_WIDTH, model.device, depth=config.max_slots + 2)  # all may be admitted at once
        self._readback = PinnedRing(config.max_slots * TOLD_WORDS, model.device)
        self._flights: deque[_Flight] = deque()
        self._scored: WeakKeyDictionary[Running, list[Landing]] = WeakKeyDictionary()  # prompts' log-probabilities, by chunk
        # On CUDA step n+1 is enqueued before step n's tokens are read; the CPU computes in the call, so nothing can run ahead.
        self._run_ahead = 1 if model.device.type == "cuda" else 0
        self._cancelled: list[TokenEvent] = []

    def prepare(self, every_mode: bool = False) -> Prepared:
        """Compile every kernel and capture graphs, see `Modes.prepare`; call once, before the first request."""
        start = time.perf_counter()
        if self.model.device.type != "cuda":  # torch has nothing to compile
            return Prepared(0.0, 0.0)
        self._warm_prefill()
        prefill_seconds = time.perf_counter() - start
        prepared = self.modes.prepare(every_mode)
        return replace(prepared, compile_seconds=prepared.compile_seconds + prefill_seconds)

    @property
    def num_running(self) -> int:
        return self._scheduler.num_running

    @property
    def num_waiting(self) -> int:
        return self._scheduler.num_waiting

    @property
    def num_positions(self) -> int:
        """Positions of the cache that running requests hold."""
        return self._scheduler.num_positions

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do or to tell."""
        return bool(self.num_running or self.num_waiting or self._flights or self._cancelled)

    def check(self, request: Request) -> None:
        """Refuse what can never run here; safe to call from any thread.

        Raises:
            RequestError: a token id outside the vocabulary, or `cached` in an engine that finds out by itself.
            ContextLengthError: the prompt leaves no room for a token.
        """
        biased = [token for token, _ in request.params.logit_bias]
        for name, ids in (("prompt", request.prompt_ids), ("stop_token_ids", request.end_ids), ("logit_bias", biased)):
            require_ids(ids, self.model.vocab_size, name)
        if request.cached and self.config.prefix_reuse:
            raise RequestError(f"cached is {request.cached} and this engine reuses prefixes by itself; turn prefix_reuse off")
        if len(request.prompt_ids) >= self.max_len:
            raise ContextLengthError(
                # litellm and others know the error by its first words.
                f"this model's maximum context length is {self.max_len} tokens, the answer included, and the prompt has "
                f"{len(request.prompt_ids)} tokens; shorten the prompt to at most {self.max_len - 1} tokens",
                "prompt",
            )

    def submit(self, request: Request) -> None:
        """Queue a request; its tokens come from later steps. The answer is cut at the end of the context. Raises as `check`."""
        self.check(request)
        self._scheduler.submit(request)

    def cancel(self, request_id: str) -> None:
        """End a request wherever it is: its slot is free for the next step, which tells one last event. Unknown ids pass."""
        if self._scheduler.cancel(request_id):
            self._cancelled.append(TokenEvent(request_id, None, "cancelled"))

    def generate(self, requests: Iterable[Request]) -> dict[str, list[int]]:
        """Run requests to their end; the ids produced, by request id. For scripts and tests; servers call `step`.

        Raises:
            RequestError: as `submit`, or a request that ended with an error.
        """
        tokens: dict[str, list[int]] = {}
        for request in requests:
            self.submit(request)
            tokens[request.id] = []
        while self.has_work:
            for event in self.step():
                if event.finish == "error":
                    raise RequestError(f"request {event.request_id}: {event.message}")
                if event.token is not None:
                    tokens[event.request_id].append(event.token)
        return tokens

    @torch.inference_mode()
    def step(self) -> list[TokenEvent]:
        """Admit, compute one prompt chunk, decode one token a row, and tell what has landed.

        Raises:
            DeviceError: the device failed; the engine must be dropped.
        """
        events, self._cancelled = self._cancelled, []
        try:
            for running in self._scheduler.admit():
                self._seat(running)
            prefilling = self._scheduler.next_prefill()
            if prefilling is not None:
                self._prefill(prefilling)
            decoding = self._scheduler.decoding()
            if decoding == [prefilling]:  # nobody waits for a step: its first token is told before anything else is launched
                return events + self._commit(0)
            if decoding:
                self._decode(decoding)
            events += self._commit(self._run_ahead if decoding else 0)
        except (torch.AcceleratorError, torch.OutOfMemoryError) as error:
            raise DeviceError(f"the device failed during a step: {str(error).splitlines()[0]}") from error
        return events

    def _seat(self, running: Running) -> None:
        """Write a request's parameters into its slot, and where they are used the ids of its prompt and its bias."""
        request, slot = running.request, running.slot
        if request.params.penalised:
            self.state.seen[slot].zero_().scatter_(0, self._on_device(request.prompt_ids, torch.int64), 1)
        if request.params.logit_bias:
            ids, values = zip(*request.params.logit_bias, strict=True)
            bias = self._on_device(values, torch.float32)
            self.state.bias[slot].zero_().scatter_(0, self._on_device(ids, torch.int64), bias)
        self._uploads.upload(pack(request, running.limit), self.state.packed[slot])

    def _prefill(self, running: Running) -> None:
        """Enqueue one chunk of a prompt, and the first token behind the last chunk."""
        prompt = running.request.prompt_ids
        if running.prefilled == 0:
            source = self._scheduler.begin(running)
            if source != running.slot and running.prefilled:
                self.cache.copy_prefix(source, running.slot, running.prefilled)
            self._last_hidden[running.slot] = self._last_hidden[source]  # of use where all of the prompt was there
        start = running.prefilled
        chunk = prompt[start : start + self.config.prefill_chunk]
        if chunk:
            hidden = self.model.prefill(self._on_device(chunk, torch.int64), start, running.slot, self.cache)
            self._last_hidden[running.slot] = hidden[-1:].clone()
            self._scheduler.advance(running, len(chunk))
            if running.request.prompt_logprobs is not None:
                self._score(running, hidden, prompt[start + 1 : start + 1 + len(chunk)], running.request.prompt_logprobs)
        if running.decoding:
            slots = torch.full((1,), running.slot, dtype=torch.int32, device=self.model.device)
            rows = Rows(slots, torch.full_like(slots, len(prompt) - 1))
            logits = self.model.logits(self._last_hidden[running.slot])
            told = self._sampler.draw(logits, rows, self.state, variant([running.request.params]))
            self._flights.append(_Flight([running], self._readback.download(told)))

    def _score(self, running: Running, hidden: Tensor, following: Sequence[int], top: int) -> None:
        """Enqueue the log-probabilities of the prompt tokens `following` each of a chunk's first hidden states `[T, C]`."""
        tokens = self._on_device(following, torch.int32)
        parts = zip(hidden[: len(tokens)].split(SCORED_ROWS), tokens.split(SCORED_ROWS), strict=True)
        landings = [download(tell(self.model.logits(states), ids, top)) for states, ids in parts if len(ids)]
        self._scored.setdefault(running, []).extend(landings)

    def _on_device(self, values: Sequence[float], dtype: torch.dtype) -> Tensor:
        host = torch.tensor(values, dtype=dtype, pin_memory=self.model.device.type == "cuda")
        return host.to(self.model.device, non_blocking=True)

    def _decode(self, rows: list[Running]) -> None:
        """Enqueue one decode step; slots cross to the device only when the batch has changed."""
        if rows != self._rows:
            self._uploads.upload([r.slot for r in rows], self._slot_of_row)
            self._rows = rows
        told = self.modes.play(len(rows), variant([r.request.params for r in rows]))
        self._flights.append(_Flight(rows, self._readback.download(told)))

    @torch.inference_mode()
    def _warm_prefill(self) -> None:
        """Play one prompt chunk into slot 0, which no request has yet: cuBLAS and SDPA choose and load their kernels."""
        length = min(self.config.prefill_chunk, self.max_len - 1)
        ids = torch.zeros(length, dtype=torch.int64, device=self.model.device)
        self.model.logits(self.model.prefill(ids, 0, 0, self.cache)[-1:])

    def _commit(self, leave: int) -> list[TokenEvent]:
        """Read flights until `leave` are in the air. Tokens behind a request's end are dropped."""
        events = []
        while len(self._flights) > leave:
            flight = self._flights.popleft()
            words = flight.landing.wait()
            width = len(words) // len(flight.rows)
            for row, running in enumerate(flight.rows):
                if running.finish is None:
                    events.append(self._tell(running, words[row * width : (row + 1) * width]))
        return events

    def _tell(self, running: Running, words: Sequence[int]) -> TokenEvent:
        """Commit what a draw told of one row: the token, and in full draws its log-probabilities."""
        request, token, prompt = running.request, words[0], None
        if running.length == len(request.prompt_ids) and request.prompt_logprobs is not None:
            prompt = self._prompt_logprobs(running, request.prompt_logprobs)
            if any(each is not None and math.isnan(each.logprob) for each in prompt):
                token = NOT_FINITE
        finish = self._scheduler.commit(running, token)
        if finish == "error":
            return TokenEvent(request.id, None, finish, NOT_FINITE_MESSAGE)
        logprobs = read_told(words, request.params.logprobs) if request.params.logprobs is not None else None
        return TokenEvent(request.id, token, finish, logprobs=logprobs, prompt_logprobs=prompt, cached=running.cached)

    def _prompt_logprobs(self, running: Running, top: int) -> tuple[Logprobs | None, ...]:
        """One for each prompt token; nothing comes before the first, so it has none."""
        words = [word for landing in self._scored.pop(running, []) for word in landing.wait()]
        rows = range(0, len(words), TOLD_WORDS)
        return (None, *(read_told(words[row : row + TOLD_WORDS], top) for row in rows))
