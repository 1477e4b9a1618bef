"""Tells the web process that a run has news, so that streams need not wait for the next look at the database."""

from __future__ import annotations

import logging

import redis

from lohan_app.redis_client import connect
from lohan_app.settings import Settings

log = logging.getLogger(__name__)

CHANNEL = "lohan:events"


def announce(settings: Settings, run_id: str) -> None:
    """Say that the run has news; call it after the commit. A broker that is away is no fault: it costs half a second."""
    try:
        with connect(settings) as client:
            client.publish(CHANNEL, run_id)
    except (redis.RedisError, OSError, ValueError) as error:
        log.debug("cannot announce news of %s: %s", run_id, error)
