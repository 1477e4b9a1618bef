"""The container's HEALTHCHECK: exit status 0 when the web server is ready, or, with the argument `worker`, when the reconciler acts."""

from __future__ import annotations

import fcntl
import os
import sys
import urllib.request
from pathlib import Path

TIMEOUT_SECONDS = 4


def main(arguments: list[str]) -> int:
    trouble = reconciler_trouble() if arguments == ["worker"] else web_trouble()
    if trouble:
        sys.stderr.write(f"{trouble}\n")
    return 1 if trouble else 0


def web_trouble() -> str | None:
    url = f"http://127.0.0.1:{os.environ.get('LOHAN_PORT', '8000')}/readyz"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=TIMEOUT_SECONDS) as reply:
            return None if reply.status == 200 else f"{url}: status {reply.status}"
    except OSError as error:
        return f"{url}: {error}"


def reconciler_trouble() -> str | None:
    """A worker's reconciler holds a lock for as long as it acts; that the lock is taken is its sign of life."""
    path = Path(os.environ.get("LOHAN_DATA_DIR", "/data")) / "reconciler.lock"
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    except OSError as error:
        return f"{path}: {error.strerror}"
    return f"{path} is not held: no reconciler acts"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
