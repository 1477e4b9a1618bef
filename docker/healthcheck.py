"""Exit status 0 when the service answers: the container's HEALTHCHECK. Standard library only."""

from __future__ import annotations

import os
import sys
import urllib.request

TIMEOUT_SECONDS = 4


def main() -> int:
    url = f"http://127.0.0.1:{os.environ.get('LOHAN_PORT', '8000')}/readyz"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=TIMEOUT_SECONDS) as reply:
            return 0 if reply.status == 200 else 1
    except OSError as error:
        sys.stderr.write(f"{url}: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
