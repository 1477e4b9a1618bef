"""A small client of the REST API on the standard library alone: what a user's own script would need."""

from __future__ import annotations

import json
import secrets
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lohan.errors import LohanError

TIMEOUT_SECONDS = 60.0
OUTAGE_SECONDS = 30.0
SERVER_ERRORS_FROM = 500
# No proxy: the appliance is on this machine, and a proxy of the environment would be asked for 127.0.0.1.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ApiError(LohanError):
    """The service refused a request; message, place and remedy are the service's own."""

    def __init__(self, status: int, problem: dict[str, Any]) -> None:
        message = problem.get("detail") or problem.get("title") or f"HTTP status {status}"
        super().__init__(str(message), place=problem.get("place"), remedy=problem.get("remedy"))
        self.status = status


class Client:
    """REST under `<base_url>/api/v1`, authorised by an API key."""

    def __init__(self, base_url: str, key: str) -> None:
        self._root = f"{base_url}/api/v1"
        self._headers = {"Authorization": f"Bearer {key}", "Accept": "application/json"}

    def get(self, path: str, **query: Any) -> Any:
        suffix = f"?{urllib.parse.urlencode(query)}" if query else ""
        return self._send(urllib.request.Request(f"{self._root}{path}{suffix}"))  # noqa: S310 - the scheme is ours

    def post(self, path: str, body: dict[str, Any], **headers: str) -> Any:
        return self._send(
            urllib.request.Request(  # noqa: S310 - the scheme is ours
                f"{self._root}{path}", json.dumps(body).encode(), {"Content-Type": "application/json", **headers}, method="POST"
            )
        )

    def upload(self, path: str, file: Path, *, name: str) -> Any:
        """Send `file` as multipart form data, together with its display name."""
        boundary = secrets.token_hex(16)
        name_part = f'--{boundary}\r\nContent-Disposition: form-data; name="name"\r\n\r\n{name}\r\n'
        file_head = (
            f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="{file.name}"\r\n'
            "Content-Type: application/jsonl\r\n\r\n"
        )
        body = name_part.encode() + file_head.encode() + file.read_bytes() + f"\r\n--{boundary}--\r\n".encode()
        headers = {"Content-Type": f"multipart/form-data; boundary={boundary}"}
        return self._send(urllib.request.Request(f"{self._root}{path}", body, headers, method="POST"))  # noqa: S310

    def wait(self, path: str, until: Callable[[dict[str, Any]], bool], *, seconds: float) -> dict[str, Any]:
        """Ask for `path` until `until` holds. A service that restarts meanwhile is asked again for half a minute.

        Raises:
            LohanError: it did not within `seconds`, or the service stays away.
        """
        deadline = time.monotonic() + seconds
        answered_at = time.monotonic()
        while True:
            try:
                found: dict[str, Any] = self.get(path)
            except LohanError as error:
                is_refusal = isinstance(error, ApiError) and error.status < SERVER_ERRORS_FROM
                if is_refusal or time.monotonic() - answered_at > OUTAGE_SECONDS:
                    raise
            else:
                answered_at = time.monotonic()
                if until(found):
                    return found
                if time.monotonic() > deadline:
                    raise LohanError(
                        f"still {found.get('state')!r} after {seconds:.0f} s", place=path, remedy="Look at the appliance's log."
                    )
            time.sleep(0.5)

    def _send(self, request: urllib.request.Request) -> Any:
        for header, value in self._headers.items():
            request.add_header(header, value)
        try:
            with _OPENER.open(request, timeout=TIMEOUT_SECONDS) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as error:
            raise ApiError(error.code, _problem(error)) from error
        except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
            reason = getattr(error, "reason", error)
            raise LohanError(f"no answer: {reason}", place=request.full_url, remedy="Look at the appliance's log.") from error


def answers(url: str) -> bool:
    """Whether a GET of `url` is answered with success now."""
    try:
        with _OPENER.open(url, timeout=5):
            return True
    except OSError:  # URLError and HTTPError are OSErrors
        return False


def _problem(error: urllib.error.HTTPError) -> dict[str, Any]:
    try:
        problem = json.load(error)
    except ValueError:
        return {}
    return problem if isinstance(problem, dict) else {}
