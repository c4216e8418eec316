"""Owns the event loop's side of the worker: who may enter, whose tokens are whose, and the way down.

Does not know text or HTTP. Everything here runs on the event loop; only Worker's thread touches the engine.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from runtime.engine import Engine
from runtime.errors import BusyError, DeviceError, QuartetError, RequestError
from runtime.request import Request, TokenEvent
from server.errors import ModeError, NotServingError
from server.worker import Cancel, Report, Switch, Switched, Worker

log = logging.getLogger(__name__)

State = Literal["starting", "ready", "draining", "failed"]

STOP_SECONDS = 1.0
"""How long the worker's thread may take to leave after a Shutdown; a step is much shorter."""


Arrival = tuple[int, TokenEvent, float]
"""Which of a call's requests, its event, and when that landed (seconds of time.monotonic)."""


class Call:
    """One HTTP request's engine requests, and what they have told and nobody has read.

    The backlog of a reader that lags is bounded: a request tells at most one event for each position of the context.

    Attributes:
        submitted: when it came; admitted: when each of its requests, by index, was given a slot; seconds of time.monotonic.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        self.ids = [request.id for request in requests]
        self.submitted = time.monotonic()
        self.admitted: dict[int, float] = {}
        self._told: asyncio.Queue[Arrival | QuartetError] = asyncio.Queue()

    async def next(self) -> Arrival:
        """The next event, as soon as there is one.

        Raises:
            QuartetError: what `fail` was given, behind the events that came before it.
        """
        told = await self._told.get()
        if isinstance(told, QuartetError):
            raise told
        return told

    def put(self, arrival: Arrival) -> None:
        self._told.put_nowait(arrival)

    def fail(self, error: QuartetError, at_once: bool = False) -> None:
        """Let `next` raise `error`; at once drops what has not been read."""
        while at_once and not self._told.empty():
            self._told.get_nowait()
        self._told.put_nowait(error)


class Dispatcher:
    """Hands requests to the worker and its reports back to their calls.

    Args:
        engine: driven by the worker's thread from `start` on.
        max_queue: requests that may wait beside those that hold a slot.
        every_mode: prepare the modes that the engine does not start in, too.

    Attributes:
        capacity: requests that can be in at once.
        running, waiting: requests with a slot, and without, as the worker last told.
        kv_usage: positions in use over positions there are, as it last told.
        stopped: whether no thread touches the engine.
        leaving: set when the server is to end: by whoever hears the signal, or here, since the engine could not start.
        start_failure: why it could not.
    """

    def __init__(self, engine: Engine, max_queue: int, every_mode: bool = False) -> None:
        self.state: State = "starting"
        self.capacity = engine.config.max_slots + max_queue
        self.running = 0
        self.waiting = 0
        self.kv_usage = 0.0
        self.stopped = True
        self.leaving = asyncio.Event()
        self.start_failure: str | None = None
        self._engine = engine
        self._every_mode = every_mode
        self._worker: Worker | None = None
        self._calls: dict[str, tuple[Call, int]] = {}  # every request the engine may still know
        self._switches: deque[asyncio.Future[Switched]] = deque()  # asked and not yet answered, in this order
        self._idle = asyncio.Event()
        self._failure = ""

    def start(self) -> None:
        """Start the worker's thread; its reports come to the running event loop."""
        loop = asyncio.get_running_loop()

        def tell(report: Report) -> None:
            if not loop.is_closed():  # else nobody is left to hear it
                loop.call_soon_threadsafe(self._receive, report)

        self._worker = Worker(self._engine, tell, self._every_mode)
        self._worker.start()
        self.stopped = False

    def check(self, count: int = 1) -> None:
        """Whether a call of `count` requests could be taken, were the queue empty.

        Raises:
            RequestError: more requests than could ever be in at once.
            NotServingError: starting or draining.
            DeviceError: the engine has failed for good.
        """
        if self.state == "failed":
            raise DeviceError(self._failure)
        if self.state != "ready":
            raise NotServingError(f"the server is {self.state}; try again later")
        if count > self.capacity:
            raise RequestError(f"the request asks for {count} answers; at most {self.capacity} can be in at once")

    @contextmanager
    def submit(self, requests: Sequence[Request]) -> Iterator[Call]:
        """Hand over one call's requests, all or none; what still runs at the end of the `with` is cancelled.

        Raises:
            BusyError: the queue is full.
            RequestError, NotServingError, DeviceError: as `check`.
        """
        self.check(len(requests))
        assert self._worker is not None
        if len(self._calls) + len(requests) > self.capacity:
            raise BusyError(f"the queue is full: {len(self._calls)} requests are running or waiting; try again later")
        call = Call(requests)
        for index, request in enumerate(requests):
            self._calls[request.id] = call, index
            self._worker.put(request)
        try:
            yield call
        finally:
            for request_id in call.ids:
                self.cancel(request_id)

    def cancel(self, request_id: str) -> None:
        """End a request that nobody wants any more; it counts until the engine has said so."""
        if request_id in self._calls and self._worker is not None:
            self._worker.put(Cancel(request_id))

    async def switch(self, ops: str | None = None, graph: bool | None = None) -> Switched:
        """Change how steps are played, between two of them; None keeps what is, and asks how that is.

        Raises:
            ModeError: this device cannot play that; nothing has changed.
            NotServingError, DeviceError: as `check`.
        """
        self.check()
        assert self._worker is not None
        answer: asyncio.Future[Switched] = asyncio.get_running_loop().create_future()
        self._switches.append(answer)
        self._worker.put(Switch(ops, graph))
        switched = await answer
        if switched.refusal is not None:
            raise ModeError(switched.refusal)
        return switched

    async def drain(self, timeout: float) -> None:
        """Take no more requests, wait for those there are, and end what is left after `timeout` seconds with an error."""
        if self.state != "failed":
            self.state = "draining"
        try:
            async with asyncio.timeout(timeout):
                while self._calls:
                    self._idle.clear()
                    await self._idle.wait()
        except TimeoutError:
            log.warning("ending %d requests that did not finish within %g s", len(self._calls), timeout)
        self._fail_all(NotServingError("the server is shutting down"))

    def stop(self) -> None:
        """End the worker's thread, if it can be ended; see `stopped`."""
        if self._worker is not None:
            self.stopped = self._worker.stop(STOP_SECONDS)

    def _receive(self, report: Report) -> None:
        if report.failure is not None:
            if self.state == "starting":
                self.start_failure = report.failure
                self.leaving.set()
            self.state, self._failure = "failed", report.failure
            self._fail_all(DeviceError(report.failure))
            self._calls.clear()
            self._idle.set()
            return
        if self.state == "starting":
            self.state = "ready"
        self.running, self.waiting = report.running, report.waiting
        self.kv_usage = report.positions / (self._engine.config.max_slots * self._engine.max_len)
        if report.switched is not None and not (answer := self._switches.popleft()).done():
            answer.set_result(report.switched)
        for request_id in report.admitted:
            call, index = self._calls[request_id]
            call.admitted[index] = report.began
        for event in report.events:
            call, index = self._calls[event.request_id]
            if event.finish is not None:
                del self._calls[event.request_id]
            call.put((index, event, report.ended))
        if not self._calls:
            self._idle.set()

    def _fail_all(self, error: QuartetError) -> None:
        for call, _ in self._calls.values():
            call.fail(error)
        for answer in self._switches:
            if not answer.done():
                answer.set_exception(error)
