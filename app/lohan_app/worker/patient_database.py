"""A supervisor's way to the database: one that does not answer is waited for, and nothing is done twice because of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeVar

from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from lohan_app.db import create_db_engine, write_transaction
from lohan_app.settings import Settings

logger = logging.getLogger("lohan_app.supervisor")

LONGEST_BACKOFF_SECONDS = 10.0

T = TypeVar("T")
Transaction = Callable[[Engine], AbstractContextManager[Session]]


class Stopped(Exception):  # noqa: N818 - no fault: the supervisor was told to stop and has no trainer to wait for
    """SIGTERM came while only the database was being waited for."""


class PatientDatabase:
    """One thread's transactions, tried again with growing pauses.

    Args:
        should_give_up: whether waiting has no sense any more.
    """

    def __init__(self, settings: Settings, should_give_up: Callable[[], bool]) -> None:
        self._engine = create_db_engine(settings)
        self._should_give_up = should_give_up
        self._next_query_at = 0.0
        self._backoff_seconds = 0.0

    def attempt(self, work: Callable[[Session], T], transaction: Transaction = write_transaction) -> T | None:
        """One transaction; None where the database does not answer, and until the back-off has passed."""
        if time.monotonic() < self._next_query_at:
            return None
        try:
            with transaction(self._engine) as session:
                result = work(session)
        except DBAPIError as error:
            self._backoff_seconds = min(max(2 * self._backoff_seconds, 0.5), LONGEST_BACKOFF_SECONDS)
            self._next_query_at = time.monotonic() + self._backoff_seconds
            logger.warning("the database does not answer (%s); next try in %.1f s", error.orig, self._backoff_seconds)
            return None
        self._backoff_seconds = 0.0
        return result

    def insist(self, work: Callable[[Session], T], transaction: Transaction = write_transaction) -> T:
        """The same, until the database answers.

        Raises:
            Stopped: see `pause`.
        """
        done: list[T] = []

        def work_and_keep(session: Session) -> bool:
            done[:] = [work(session)]
            return True

        while not self.attempt(work_and_keep, transaction):
            self.pause()
        return done[0]

    def pause(self) -> None:
        """Sleep until the next query is due.

        Raises:
            Stopped: there is no time left; the events stay in the file for the next supervisor.
        """
        while time.monotonic() < self._next_query_at:
            if self._should_give_up():
                raise Stopped
            time.sleep(0.1)

    def close(self) -> None:
        self._engine.dispose()
