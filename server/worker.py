"""Owns the one thread that touches the device: takes messages, plays the engine's steps, tells what they did.

Does not know the event loop, text or HTTP. Messages and reports are picklable, so that a process could take the thread's place.
"""

import gc
import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Thread

from runtime.engine import Engine
from runtime.errors import ConfigError, QuartetError, RequestError
from runtime.modes import Playing
from runtime.request import Request, TokenEvent

log = logging.getLogger(__name__)

SWITCH_SECONDS = 0.0002
"""The interpreter's switch interval. Its default of 5 ms is longer than a decode step: waiting for it costs whole steps."""


@dataclass(frozen=True)
class Cancel:
    """End a request wherever it is; unknown ids pass."""

    request_id: str


@dataclass(frozen=True)
class Switch:
    """Change how steps are played, None keeps what is; answered by a Report's `switched`, in the order of asking."""

    ops: str | None = None
    graph: bool | None = None


@dataclass(frozen=True)
class Shutdown:
    """Leave the loop; running requests are dropped without a word."""


Message = Request | Cancel | Switch | Shutdown
"""A request is to be queued."""


@dataclass(frozen=True)
class Switched:
    """What became of a Switch.

    Attributes:
        playing: how steps are played from now on.
        stall_ms: how long the streams stood still for it.
        refusal: why nothing has changed, if nothing has.
    """

    playing: Playing
    stall_ms: float
    refusal: str | None = None


@dataclass(frozen=True)
class Report:
    """What happened since the last report. The first one, empty, says that the thread is ready.

    Attributes:
        events: in the order of their making.
        admitted: ids of the requests that were given a slot.
        began, ended: the step's bounds, seconds of time.monotonic.
        running, waiting: requests with a slot, and without, after the step.
        positions: of the cache that those with a slot hold.
        switched: the answer to a Switch.
        failure: why no further report will come.
    """

    events: tuple[TokenEvent, ...] = ()
    admitted: tuple[str, ...] = ()
    began: float = 0.0
    ended: float = 0.0
    running: int = 0
    waiting: int = 0
    positions: int = 0
    switched: Switched | None = None
    failure: str | None = None


class Worker:
    """The engine's thread. `put` may be called from any thread; `tell` is called from the worker's, once a step.

    Args:
        every_mode: prepare the modes that the engine does not start in, too.
    """

    def __init__(self, engine: Engine, tell: Callable[[Report], None], every_mode: bool = False) -> None:
        self._engine = engine
        self._tell = tell
        self._every_mode = every_mode
        self._inbox: SimpleQueue[Message] = SimpleQueue()
        self._waiting: deque[str] = deque()  # as the engine's own queue: first come, first served
        self._thread = Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, message: Message) -> None:
        self._inbox.put(message)

    def stop(self, timeout: float) -> bool:
        """Ask the thread to end and wait; whether it did within `timeout` seconds."""
        self.put(Shutdown())
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        sys.setswitchinterval(SWITCH_SECONDS)
        try:
            prepared = self._engine.prepare(self._every_mode)
            log.info(f"ready: {prepared}" if prepared.compile_seconds else "ready")
            gc.freeze()  # what was made so far stays: collections need not walk it between two tokens
            self._tell(Report())
            while self._take_messages():
                if self._engine.has_work:
                    began = time.monotonic()
                    self._report(self._engine.step(), began)
        except ConfigError as error:  # of `prepare`, when nobody waits yet: the door ends with its words
            self._tell(Report(failure=str(error)))
        except Exception as error:  # whatever it was: those who wait for tokens must hear of it
            log.exception("the engine's thread has died")
            told = str(error) if isinstance(error, QuartetError) else "the engine failed; the server's log has the details"
            self._tell(Report(failure=told))
        finally:
            gc.unfreeze()  # else Triton's bindings complain at exit about what nobody took down

    def _take_messages(self) -> bool:
        """Handle what has arrived, waiting for it when there is nothing else to do; False at a Shutdown."""
        for message in self._messages():
            match message:
                case Request():
                    self._submit(message)
                case Cancel(request_id):
                    self._engine.cancel(request_id)
                    if request_id in self._waiting:
                        self._waiting.remove(request_id)
                case Switch(ops, graph):
                    self._switch(ops, graph)
                case Shutdown():
                    return False
        return True

    def _messages(self) -> Iterator[Message]:
        if not self._engine.has_work:
            yield self._inbox.get()
        while True:
            try:
                yield self._inbox.get_nowait()
            except Empty:
                return

    def _submit(self, request: Request) -> None:
        try:
            self._engine.submit(request)
        except RequestError as error:  # checked at the door already; a gap there must not end the thread
            self._report([TokenEvent(request.id, None, "error", str(error))], began=time.monotonic())
        else:
            self._waiting.append(request.id)

    def _switch(self, ops: str | None, graph: bool | None) -> None:
        began, before, stall_ms, refusal = time.monotonic(), self._engine.modes.mode, 0.0, None
        try:
            stall_ms = 1e3 * self._engine.modes.switch(ops, graph)
        except ConfigError as error:
            refusal = str(error)
        playing = self._engine.modes.playing()
        if self._engine.modes.mode != before:
            log.info("ops %s, graph %s from now on; streams stood still for %.3f ms", playing.ops, playing.graph, stall_ms)
        self._report([], began, Switched(playing, stall_ms, refusal))

    def _report(self, events: list[TokenEvent], began: float, switched: Switched | None = None) -> None:
        engine, ended = self._engine, time.monotonic()
        admitted = tuple(self._waiting.popleft() for _ in range(len(self._waiting) - engine.num_waiting))
        counts = (engine.num_running, engine.num_waiting, engine.num_positions)
        self._tell(Report(tuple(events), admitted, began, ended, *counts, switched))
