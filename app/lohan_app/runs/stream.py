"""Server-sent events of runs: one poller per web process looks at the database for all open streams.

A stream resumes by the id of the last event it saw, `attempt:seq`. It ends when its run has ended, and after a quarter of an hour in
any case: the browser connects again by itself, and is asked again who it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import redis.asyncio
from redis.exceptions import RedisError
from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError
from starlette.concurrency import run_in_threadpool

from lohan.events import EventType
from lohan_app.db import read_transaction
from lohan_app.entities import TERMINAL_STATES
from lohan_app.errors import TooManyRequests, Unprocessable
from lohan_app.redis_client import address
from lohan_app.runs import queries
from lohan_app.runs.announce import CHANNEL
from lohan_app.runs.queries import Cursor, StoredEvent
from lohan_app.runs.schemas import RunView, view_of
from lohan_app.settings import Settings

log = logging.getLogger(__name__)

POLL_SECONDS = 0.5
# However many announcements come, the database is not asked more often than this.
SHORTEST_POLL_SECONDS = 0.1
RECONNECT_SECONDS = 5.0
# Proxies and browsers give a silent connection up; 15 s is below the shortest time-out in common use.
KEEP_ALIVE_SECONDS = 15.0
LONGEST_STREAM_SECONDS = 15 * 60.0
EVENTS_PER_LOOK = 500
# A reader that has fallen this far behind is let go; it resumes from the database.
QUEUE_LIMIT = 4 * EVENTS_PER_LOOK
STREAMS_PER_USER = 32
# What of a run is news besides its steps.
_STATE_FIELDS = (
    *("state", "wanted", "state_reason", "pause_cause", "stopped_step", "start_after", "phase", "phase_progress", "attempt"),
    *("resumed_step", "total_steps", "first_loss", "last_loss", "prepared_at"),
)
_EVENT_ID = re.compile(r"(\d{1,9}):(\d{1,9})")
_EVENT_TYPES = frozenset(str(kind) for kind in EventType)
_END: Final = None


@dataclass(frozen=True, slots=True)
class Look:
    """What one look at the database found about a run."""

    view: RunView
    events: list[StoredEvent]
    has_more: bool
    """There are more events than one look takes."""

    @property
    def has_ended(self) -> bool:
        # Events are stored before the state that ends the run: when it is seen, all of them can be.
        return self.view.state in TERMINAL_STATES and not self.has_more


@dataclass(slots=True, eq=False)
class _Feed:
    """A run with open streams."""

    cursor: Cursor
    state: tuple[Any, ...] = ()
    """What was last told of `_STATE_FIELDS`."""
    queues: set[asyncio.Queue[tuple[Cursor, bytes] | None]] = field(default_factory=set)


def parse_event_id(text: str | None) -> Cursor | None:
    """Raises Unprocessable where `text` is not the id of an event."""
    if not text:
        return None
    match = _EVENT_ID.fullmatch(text)
    if match is None:
        raise Unprocessable(f"{text[:40]!r} is no event id", place="Last-Event-ID", remedy="Send the id of the last event, attempt:seq.")
    return int(match[1]), int(match[2])


class EventHub:
    """Owned by the web process; everything but `_look` happens on its event loop."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine = engine
        self._settings = settings
        self._feeds: dict[str, _Feed] = {}
        self._streams: Counter[str] = Counter()
        self._tasks: list[asyncio.Task[None]] = []
        self._news = asyncio.Event()

    async def stream(self, run_id: str, user_id: str, cursor: Cursor | None) -> AsyncIterator[bytes]:
        """The run's events after `cursor` (None: from now on), as they come. The caller has checked that the user may see the run.

        Raises:
            TooManyRequests: the user has too many streams open.
        """
        if self._streams[user_id] >= STREAMS_PER_USER:
            raise TooManyRequests(f"you have {STREAMS_PER_USER} streams open", remedy="Close some pages.")
        return self._stream(run_id, user_id, cursor)

    async def _stream(self, run_id: str, user_id: str, cursor: Cursor | None) -> AsyncIterator[bytes]:
        queue: asyncio.Queue[tuple[Cursor, bytes] | None] = asyncio.Queue(QUEUE_LIMIT)
        deadline = time.monotonic() + LONGEST_STREAM_SECONDS
        self._streams[user_id] += 1
        try:
            present = await run_in_threadpool(self._present, run_id)
            here = present if cursor is None else cursor
            # First in line for what comes, then what has been: nothing falls between the two.
            feed = self._feeds.setdefault(run_id, _Feed(present))
            feed.queues.add(queue)
            self._start()
            while True:
                look = (await run_in_threadpool(self._look, {run_id: here})).get(run_id)
                if look is None:
                    return
                for event in look.events:
                    here = event.cursor
                    yield _encode_event(event, look.view)
                if not look.has_more:
                    break
            yield _encode_state(look.view, here)
            if look.has_ended:
                return
            feed.state = feed.state or _state_of(look.view)
            async for message in self._follow(queue, here, deadline):
                yield message
        finally:
            self._leave(run_id, queue)
            self._streams[user_id] -= 1

    async def _follow(self, queue: asyncio.Queue[tuple[Cursor, bytes] | None], here: Cursor, deadline: float) -> AsyncIterator[bytes]:
        while time.monotonic() < deadline:
            try:
                item = await asyncio.wait_for(queue.get(), KEEP_ALIVE_SECONDS)
            except TimeoutError:
                yield b": still here\n\n"
                continue
            if item is _END:
                return
            position, message = item
            # What was read at the start may be in the queue too. A state carries the position it was seen at.
            if position > here or message.startswith(b"event: state"):
                here = max(here, position)
                yield message

    def _leave(self, run_id: str, queue: asyncio.Queue[tuple[Cursor, bytes] | None]) -> None:
        feed = self._feeds.get(run_id)
        if feed is not None:
            feed.queues.discard(queue)
            if not feed.queues:
                del self._feeds[run_id]

    async def close(self) -> None:
        """End every stream and the poller."""
        for feed in self._feeds.values():
            for queue in feed.queues:
                _push(queue, [], is_last=True)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []

    # ------------------------------------------------------------ the poller
    def _start(self) -> None:
        if not self._tasks or self._tasks[0].done():
            for task in self._tasks:
                task.cancel()
            self._tasks = [asyncio.create_task(self._poll()), asyncio.create_task(self._listen())]

    async def _poll(self) -> None:
        """Look for news until nobody listens any more."""
        while self._feeds:
            await asyncio.sleep(SHORTEST_POLL_SECONDS)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), POLL_SECONDS - SHORTEST_POLL_SECONDS)
            self._news.clear()
            try:
                looks = await run_in_threadpool(self._look, {run_id: feed.cursor for run_id, feed in self._feeds.items()})
            except DBAPIError as error:
                log.warning("streams wait for the database: %s", error.orig)
                continue
            except Exception:  # one bad look must not silence all streams
                log.exception("streams could not be fed")
                continue
            for run_id, look in looks.items():
                if run_id in self._feeds:
                    _broadcast(self._feeds[run_id], look)
        for task in self._tasks[1:]:
            task.cancel()

    async def _listen(self) -> None:
        """Hear announcements while the broker is there; without it the poller's own pace is enough."""
        while True:
            with contextlib.suppress(RedisError, OSError):
                url, path = address(self._settings)
                client = redis.asyncio.Redis(unix_socket_path=path) if path is not None else redis.asyncio.Redis.from_url(url)
                async with client, client.pubsub() as channel:
                    await channel.subscribe(CHANNEL)
                    async for _ in channel.listen():
                        self._news.set()
            await asyncio.sleep(RECONNECT_SECONDS)

    # ------------------------------------------------------------ the database (in a thread)
    def _present(self, run_id: str) -> Cursor:
        with read_transaction(self._engine) as session:
            return queries.last_cursor(session, run_id)

    def _look(self, cursors: Mapping[str, Cursor]) -> dict[str, Look]:
        looks = {}
        with read_transaction(self._engine) as session:
            # The runs first: a state that ends a run is stored after its events, so events read later are complete.
            for named in queries.named_runs(session, cursors):
                view = view_of(named)
                events = queries.events_after(session, view.id, cursors[view.id], EVENTS_PER_LOOK)
                looks[view.id] = Look(view, events, has_more=len(events) == EVENTS_PER_LOOK)
        return looks


def _state_of(view: RunView) -> tuple[Any, ...]:
    return tuple(getattr(view, name) for name in _STATE_FIELDS)


def _broadcast(feed: _Feed, look: Look) -> None:
    messages = [(event.cursor, _encode_event(event, look.view)) for event in look.events]
    if look.events:
        feed.cursor = look.events[-1].cursor
    state = _state_of(look.view)
    if (state != feed.state and not look.has_more) or look.has_ended:
        feed.state = state
        messages.append((feed.cursor, _encode_state(look.view, feed.cursor)))
    for queue in feed.queues:
        _push(queue, messages, is_last=look.has_ended)


def _push(queue: asyncio.Queue[tuple[Cursor, bytes] | None], messages: Iterable[tuple[Cursor, bytes]], *, is_last: bool) -> None:
    try:
        for message in messages:
            queue.put_nowait(message)
        if is_last:
            queue.put_nowait(_END)
    except asyncio.QueueFull:
        # Let go of the reader; it resumes by the last id it really got.
        while not queue.empty():
            queue.get_nowait()
        queue.put_nowait(_END)


def _encode_event(event: StoredEvent, view: RunView) -> bytes:
    data = {**event.data, "attempt": event.cursor[0], "seq": event.cursor[1], "type": event.type}
    if event.type == EventType.STEP:
        data |= {"total_steps": view.total_steps, "eta_seconds": view.eta_seconds}
    return _message(event.type if event.type in _EVENT_TYPES else "message", event.cursor, data)


def _encode_state(view: RunView, cursor: Cursor) -> bytes:
    return _message("state", cursor, {**view.model_dump(mode="json"), "time": time.time()})


def _message(kind: str, cursor: Cursor, data: dict[str, Any]) -> bytes:
    # JSON without line breaks and in ASCII: no text of a user's can end the field or the message.
    return f"event: {kind}\nid: {cursor[0]}:{cursor[1]}\ndata: {json.dumps(data, allow_nan=False)}\n\n".encode()
