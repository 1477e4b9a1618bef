"""A client of the broker's server for what is not a task: whether it answers, and announcements."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from lohan_app.settings import Settings

# A broker on this machine answers in under a millisecond; a request must not wait longer for one that is away.
TIMEOUT_SECONDS = 1.0


def connect(settings: Settings, *, reply_seconds: float = 0.0) -> redis.Redis:
    """A client that connects at its first command and gives up at once: redis-py's own retries would take seconds.

    `reply_seconds` is how long the server may take to answer a command that waits there for something.
    """
    options: dict[str, Any] = {"socket_timeout": reply_seconds + TIMEOUT_SECONDS, "retry": Retry(NoBackoff(), 0)}
    url, path = address(settings)
    if path is not None:
        return redis.Redis(unix_socket_path=path, **options)
    return redis.Redis.from_url(url, socket_connect_timeout=TIMEOUT_SECONDS, **options)


def address(settings: Settings) -> tuple[str, str | None]:
    """(URL, None), or ("", path) of a unix socket: Celery's `redis+socket://` is not a URL that redis-py knows."""
    url = settings.celery_broker_url
    return ("", unquote(url.removeprefix("redis+socket://"))) if url.startswith("redis+socket://") else (url, None)
