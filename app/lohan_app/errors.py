"""Errors of the service and how every error is shown: problem+json (RFC 9457) for the API, a page for people.

An error knows its status; it is rendered here and nowhere else. The texts are those of `lohan.errors`: message, place, remedy.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, ClassVar
from urllib.parse import quote

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from sqlalchemy.exc import OperationalError, ProgrammingError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, RedirectResponse, Response

from lohan.errors import NO_SPACE, CapacityError, ConfigError, DataError, LohanError, ModelError, StorageError
from lohan_app.middleware import SECURITY_HEADERS

log = logging.getLogger(__name__)

PROBLEM_MEDIA_TYPE = "application/problem+json"
# A refused value is shown so that it can be found again, not so that it can be read back whole.
SHOWN_VALUE_CHARACTERS = 200


class ServiceError(LohanError):
    """Base of the errors that the service itself raises; `status` is their HTTP status."""

    status: ClassVar[int] = 500
    headers: Mapping[str, str]

    def __init__(
        self, message: str, *, place: str | None = None, remedy: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message, place=place, remedy=remedy)
        self.headers = headers or {}


class BadRequest(ServiceError):  # noqa: N818 - named as HTTP names them, here and below
    status = 400


class AuthenticationRequired(ServiceError):  # noqa: N818
    """Nobody is logged in, or the key is not valid: 401 for the API, the login page for a browser."""

    status = 401


class SetupRequired(ServiceError):  # noqa: N818
    """The first administrator has not been made yet: 503 for the API, the set-up page for a browser."""

    status = 503


class Forbidden(ServiceError):  # noqa: N818
    status = 403


class NotFound(ServiceError):  # noqa: N818
    """No such thing, or none that this user may know of."""

    status = 404


class Conflict(ServiceError):  # noqa: N818
    status = 409


def still_needed(what: str, runs: Sequence[str], *, place: str) -> Conflict:
    """The refusal to delete a `what` (`model`, `dataset`) that `runs` need; the first few are named."""
    message = f"{len(runs)} unfinished run{'s' if len(runs) > 1 else ''} of this {what}: {', '.join(runs[:5])}"
    return Conflict(message, place=place, remedy="Wait for them, or cancel them first.")


class TooLarge(ServiceError):  # noqa: N818
    status = 413


class Unprocessable(ServiceError):  # noqa: N818
    """Well-formed, but not allowed; `place` is the field's path."""

    status = 422


class TooManyRequests(ServiceError):  # noqa: N818
    status = 429


class Unavailable(ServiceError):  # noqa: N818
    status = 503


class InsufficientStorage(ServiceError):  # noqa: N818
    """The disk is full, or would be."""

    status = 507


@dataclass(frozen=True, slots=True)
class FieldFault:
    """One refused field: its path (`training.batch_size`), what is allowed, and the value found (None where it is missing)."""

    field: str
    message: str
    value: str | None = None


@dataclass(frozen=True, slots=True)
class Problem:
    """What problem+json and the error page show alike."""

    type: str
    title: str
    status: int
    detail: str
    place: str | None = None
    remedy: str | None = None
    errors: tuple[FieldFault, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        body: dict[str, Any] = {
            "type": self.type,
            "title": self.title,
            "status": self.status,
            "detail": self.detail,
            "place": self.place,
            "remedy": self.remedy,
            **self.extra,
        }
        if self.errors:
            body["errors"] = [{"field": fault.field, "message": fault.message, "value": fault.value} for fault in self.errors]
        return body


ErrorPage = Callable[[Request, Problem], Response]

# The engine's errors have no status of their own; a subclass stands before its base.
ENGINE_STATUSES: tuple[tuple[type[LohanError], int], ...] = ((CapacityError, 409), (ConfigError, 422), (DataError, 422), (ModelError, 422))


HTTP_REMEDIES = {
    400: "Send a body of the type that Content-Type names.",
    404: "Check the address; /docs lists those of the API.",
    405: "Use another method; /docs lists those of each address.",
    413: "Send less at once.",
}


def problem_of_error(error: LohanError) -> Problem:
    """The problem that shows a typed error."""
    status = error.status if isinstance(error, ServiceError) else _engine_status(error)
    extra = {"need_bytes": error.need_bytes, "have_bytes": error.have_bytes} if isinstance(error, CapacityError) else {}
    headers = error.headers if isinstance(error, ServiceError) else {}
    return Problem(
        f"urn:lohan:problem:{_kebab(type(error).__name__)}",
        HTTPStatus(status).phrase,
        status,
        error.message,
        error.place,
        error.remedy,
        extra=extra,
        headers=headers,
    )


def _engine_status(error: LohanError) -> int:
    if isinstance(error, StorageError):
        return 507 if error.errno in NO_SPACE else 500
    return next((status for kind, status in ENGINE_STATUSES if isinstance(error, kind)), 500)


def _kebab(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "-", name).lower()


def problem_of_validation(error: RequestValidationError) -> Problem:
    """The problem that lists every refused field of a request."""
    faults = tuple(_field_fault(fault) for fault in error.errors())
    detail = "; ".join(f"{fault.field}: {fault.message}" + (f" (found {fault.value})" if fault.value else "") for fault in faults)
    return Problem(
        "urn:lohan:problem:invalid-fields",
        HTTPStatus(422).phrase,
        422,
        detail,
        place=faults[0].field if faults else None,
        remedy="Correct the fields named above.",
        errors=faults,
    )


def _field_fault(fault: Mapping[str, Any]) -> FieldFault:
    # The first part says where in the request the field stood (body, query, path); the path within is what the user wrote.
    path = ".".join(str(part) for part in fault["loc"][1:]) or str(fault["loc"][0])
    hide = fault["type"] in ("missing", "json_invalid") or isinstance(fault.get("input"), dict | list | bytes)
    hide = hide or "password" in path or "token" in path
    value = None if hide else repr(fault.get("input"))[:SHOWN_VALUE_CHARACTERS]
    return FieldFault(path, str(fault["msg"]), value)


def problem_of_http(error: HTTPException) -> Problem:
    """The problem that shows an error of the framework: unknown path, method not allowed."""
    phrase = HTTPStatus(error.status_code).phrase
    slug = phrase.lower().replace(" ", "-")
    remedy = HTTP_REMEDIES.get(error.status_code)
    return Problem(f"urn:lohan:problem:{slug}", phrase, error.status_code, str(error.detail), remedy=remedy, headers=error.headers or {})


def is_api(request: Request) -> bool:
    """Whether the reply is read by a program. It decides only how an error looks, never who may do what."""
    if request.scope["path"].startswith("/api/"):
        return True
    return "text/html" not in request.headers.get("accept", "") and request.headers.get("hx-request") != "true"


def problem_response(problem: Problem) -> Response:
    """The problem as JSON; ASCII only, because a refused value may hold a lone surrogate that UTF-8 cannot carry."""
    body = json.dumps(problem.to_dict(), allow_nan=False)
    return Response(body, problem.status, {**SECURITY_HEADERS, **problem.headers}, PROBLEM_MEDIA_TYPE)


def respond(request: Request, problem: Problem) -> Response:
    """Show the problem to whoever asked: JSON to a program, a page to a person."""
    if is_api(request):
        return problem_response(problem)
    page: ErrorPage | None = getattr(request.app.state, "error_page", None)
    if page is None:
        return HTMLResponse("<!doctype html><title>Error</title><p>The request failed.", problem.status, dict(SECURITY_HEADERS))
    response = page(request, problem)
    response.headers.update({**SECURITY_HEADERS, **problem.headers})
    return response


def _send_to(request: Request, place: str) -> Response:
    # htmx follows a redirect inside the fragment it swaps; this header makes it load the page instead.
    if request.headers.get("hx-request") == "true":
        return Response(status_code=401, headers={"HX-Redirect": place})
    return RedirectResponse(place, 303)


def install_error_handlers(app: FastAPI) -> None:
    """Register the one place where errors are rendered."""

    @app.exception_handler(AuthenticationRequired)
    def on_authentication_required(request: Request, error: AuthenticationRequired) -> Response:
        if is_api(request):
            return problem_response(problem_of_error(error))
        target = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        return _send_to(request, "/login" if request.method != "GET" or target == "/" else f"/login?next={quote(target, safe='')}")

    @app.exception_handler(SetupRequired)
    def on_setup_required(request: Request, error: SetupRequired) -> Response:
        return problem_response(problem_of_error(error)) if is_api(request) else _send_to(request, "/setup")

    @app.exception_handler(LohanError)
    def on_lohan_error(request: Request, error: LohanError) -> Response:
        problem = problem_of_error(error)
        if problem.status >= 500:
            log.error("%s %s: %s", request.method, request.url.path, error)
        return respond(request, problem)

    @app.exception_handler(RequestValidationError)
    def on_invalid(request: Request, error: RequestValidationError) -> Response:
        return respond(request, problem_of_validation(error))

    @app.exception_handler(HTTPException)
    def on_http(request: Request, error: HTTPException) -> Response:
        return respond(request, problem_of_http(error))

    @app.exception_handler(OperationalError)
    @app.exception_handler(ProgrammingError)  # PostgreSQL's for a table that no migration has made yet
    @app.exception_handler(PoolTimeoutError)
    def on_database(request: Request, error: Exception) -> Response:
        # Locked for longer than the busy timeout, or the server is away: nothing was written, the same request may work later.
        log.error("%s %s: database: %s", request.method, request.url.path, error)
        return respond(
            request,
            problem_of_error(
                Unavailable(
                    "the database does not answer", remedy="Try again in a few seconds; /readyz says more.", headers={"Retry-After": "5"}
                )
            ),
        )

    @app.exception_handler(Exception)
    def on_unexpected(request: Request, error: Exception) -> Response:
        # The text of an unforeseen error may hold anything; it goes to the log (the server writes the traceback) and not to the client.
        return respond(
            request,
            Problem(
                "urn:lohan:problem:internal",
                HTTPStatus(500).phrase,
                500,
                f"an unexpected {type(error).__name__} stopped this request",
                remedy="See the server's log.",
            ),
        )
