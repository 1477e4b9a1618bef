"""Wake-ups for the reconciler, through the broker: a hint and no more; without it, the reconciler looks every two seconds."""

from __future__ import annotations

import logging
from contextlib import closing

from lohan_app.settings import Settings

logger = logging.getLogger(__name__)

WAKE_KEY = "lohan:wake"
"""A list of one element at most: somebody has work for the reconciler."""


def wake(settings: Settings) -> None:
    """Tell the reconciler that there is something to do. Call it after the commit that makes it true; never raises."""
    from lohan_app.redis_client import connect  # here: it is a fifth of the start of a supervisor, which needs it only at its end

    try:
        with closing(connect(settings)) as client, client.pipeline(transaction=True) as both:
            both.lpush(WAKE_KEY, "1")
            both.ltrim(WAKE_KEY, 0, 0)
            both.execute()
    except Exception as error:  # noqa: BLE001 - the library lets socket and protocol errors through; none of them matters here
        logger.debug("cannot wake the reconciler (%s)", error)


def wait_for_wake(settings: Settings, seconds: float) -> bool:
    """Wait until somebody calls `wake`, `seconds` at most.

    Raises:
        Exception: the broker does not answer; the caller sleeps instead.
    """
    from lohan_app.redis_client import connect

    with closing(connect(settings, reply_seconds=seconds)) as client:
        return client.blpop([WAKE_KEY], timeout=seconds) is not None
