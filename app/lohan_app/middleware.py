"""What every request and reply passes: the Host allow-list, the security headers, a cap on the body.

Pure ASGI, so that streams pass unbuffered. None of this decides who may do what: that is the routers' dependency (auth.dependencies).
"""

from __future__ import annotations

import ipaddress
import json
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# Everything comes from this service's own files; no inline script or style, no plug-in, no frame around us.
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; font-src 'self'; "
    "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
SECURITY_HEADERS: Final[Mapping[str, str]] = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    # Not `no-referrer`: with it browsers send `Origin: null` with a form that posts to its own site (Chromium 156; Fetch, "append a
    # request Origin header"), and the check against forged requests needs that Origin. Other sites get no referrer either way.
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "x-frame-options": "DENY",
}
# Replies show private things; whatever may be cached (static files) says so itself.
DEFAULT_CACHE_CONTROL = "no-store"
# The largest honest JSON or form body is a run's settings, a few kB.
DEFAULT_BODY_LIMIT_BYTES = 1024 * 1024
BODY_LIMIT_SCOPE_KEY = "lohan.body_limit"

_HOST = re.compile(r"(?P<name>\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(?::(?P<port>[0-9]{1,5}))?")


def own_host_names() -> frozenset[str]:
    """The names this machine goes by: localhost, its host name, and that name in multicast DNS."""
    name = socket.gethostname().lower()
    return frozenset({"localhost", name, name.split(".", 1)[0], f"{name.split('.', 1)[0]}.local"})


def host_is_allowed(host: str, allowed_names: frozenset[str]) -> bool:
    """Whether a Host header names this service: an IP literal, or one of `allowed_names` (lower case).

    A page of another site whose name was rebound to this machine's address sends its own name, and is refused. An IP literal
    cannot be rebound.
    """
    match = _HOST.fullmatch(host)
    if match is None:
        return False
    name = match["name"].lower().rstrip(".")
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return name in allowed_names
    return True


class HostGuard:
    """Refuses requests whose Host is none of ours (DNS rebinding)."""

    def __init__(self, app: ASGIApp, allowed_hosts: tuple[str, ...]) -> None:
        self._app = app
        self._names = own_host_names() | {name.lower().rstrip(".") for name in allowed_hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            hosts = Headers(scope=scope).getlist("host")
            if len(hosts) != 1 or not host_is_allowed(hosts[0], self._names):
                await _refuse_host(hosts)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _refuse_host(hosts: list[str]) -> Response:
    problem = {
        "type": "urn:lohan:problem:unknown-host",
        "title": "Misdirected Request",
        "status": 421,
        "detail": f"this service is not reached as {', '.join(hosts)[:255]!r}",
        "place": "Host",
        "remedy": "Use the machine's IP address or name, or add the name to LOHAN_ALLOWED_HOSTS.",
    }
    return Response(json.dumps(problem), 421, media_type="application/problem+json")


class SecurityHeaders:
    """Adds the security headers to every reply that does not set them itself."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
                headers.setdefault("cache-control", DEFAULT_CACHE_CONTROL)
            await send(message)

        await self._app(scope, receive, send_with_headers)


@dataclass(slots=True)
class BodyAllowance:
    """How large this request's body may grow; an endpoint that streams its body to disk raises it."""

    limit_bytes: int


class BodyLimit:
    """Counts a request's body as it arrives and stops it at its allowance, whatever Content-Length says."""

    def __init__(self, app: ASGIApp, limit_bytes: int = DEFAULT_BODY_LIMIT_BYTES) -> None:
        self._app = app
        self._limit_bytes = limit_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        allowance = BodyAllowance(self._limit_bytes)
        scope[BODY_LIMIT_SCOPE_KEY] = allowance
        received_bytes = 0

        async def receive_counted() -> Message:
            nonlocal received_bytes
            message = await receive()
            received_bytes += len(message.get("body", b""))
            if received_bytes > allowance.limit_bytes:
                raise HTTPException(413, f"the request's body is larger than {allowance.limit_bytes} bytes")
            return message

        await self._app(scope, receive_counted, send)


def allow_body(scope: Mapping[str, Any], limit_bytes: int) -> None:
    """Let this request's body grow to `limit_bytes`."""
    allowance = scope[BODY_LIMIT_SCOPE_KEY]
    assert isinstance(allowance, BodyAllowance)
    allowance.limit_bytes = limit_bytes
