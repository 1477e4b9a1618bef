"""The web server's process: `python -m lohan_app.worker.web FD` serves the application on the listening socket that it inherits."""

from __future__ import annotations

import socket
import sys

import uvicorn

from lohan_app.main import create_app
from lohan_app.settings import Settings, load_settings

SHUTDOWN_SECONDS = 3
"""Event streams never end by themselves: a browser connects again when the server is back."""


def serve(settings: Settings, listener: socket.socket) -> None:
    """Serve until SIGTERM or SIGINT."""
    config = uvicorn.Config(
        create_app(settings),
        server_header=False,
        # Addresses in the audit log are those of the connections: nobody in front of us is trusted to name others.
        proxy_headers=False,
        access_log=False,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        log_level="info",
    )
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    serve(load_settings(), socket.socket(fileno=int(sys.argv[1])))
