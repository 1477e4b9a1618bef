"""People and their keys: users, browser sessions, API keys, the audit log, idempotency keys."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import ForeignKey, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from lohan_app.entities.base import Entity, Id, new_id, now, text_enum


class Role(StrEnum):
    """What a user may do: members own datasets and runs, admins also manage users, models and the queue."""

    ADMIN = "admin"
    MEMBER = "member"


class User(Entity):
    __tablename__ = "users"

    id: Mapped[str] = mapped_column(Id, primary_key=True, default=lambda: new_id("user"))
    name: Mapped[str] = mapped_column(String(64), unique=True)
    password_hash: Mapped[str] = mapped_column(String(255))
    role: Mapped[Role] = mapped_column(text_enum(Role))
    created_at: Mapped[datetime] = mapped_column(default=now)


class SetupClaim(Entity):
    """One row at most: its primary key makes the first-run admin a single winner, whoever races for it."""

    __tablename__ = "setup_claims"

    id: Mapped[int] = mapped_column(primary_key=True, default=1)
    user_id: Mapped[str] = mapped_column(ForeignKey("users.id"))
    created_at: Mapped[datetime] = mapped_column(default=now)


class BrowserSession(Entity):
    """A login; the cookie carries a random token of which only the SHA-256 is stored."""

    __tablename__ = "browser_sessions"

    id: Mapped[str] = mapped_column(Id, primary_key=True, default=lambda: new_id("session"))
    token_hash: Mapped[str] = mapped_column(String(64), unique=True)
    csrf_token: Mapped[str] = mapped_column(String(64))
    user_id: Mapped[str] = mapped_column(ForeignKey("users.id", ondelete="CASCADE"), index=True)
    created_at: Mapped[datetime] = mapped_column(default=now)
    last_seen_at: Mapped[datetime] = mapped_column(default=now)
    user_agent: Mapped[str] = mapped_column(String(255), default="")


class ApiKey(Entity):
    """A bearer key `lohan_<id hex>_<secret>`; only the SHA-256 of the secret is stored."""

    __tablename__ = "api_keys"

    id: Mapped[str] = mapped_column(Id, primary_key=True, default=lambda: new_id("key"))
    user_id: Mapped[str] = mapped_column(ForeignKey("users.id", ondelete="CASCADE"), index=True)
    name: Mapped[str] = mapped_column(String(100))
    secret_hash: Mapped[str] = mapped_column(String(64))
    scopes: Mapped[list[str]]
    created_at: Mapped[datetime] = mapped_column(default=now)
    last_used_at: Mapped[datetime | None]
    expires_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]


class AuditEntry(Entity):
    """Who did what: logins, keys, uploads, submissions, cancellations."""

    __tablename__ = "audit_entries"

    id: Mapped[str] = mapped_column(Id, primary_key=True, default=lambda: new_id("audit"))
    time: Mapped[datetime] = mapped_column(default=now, index=True)
    user_id: Mapped[str | None] = mapped_column(ForeignKey("users.id"))
    action: Mapped[str] = mapped_column(String(64))
    subject: Mapped[str] = mapped_column(String(255), default="")
    address: Mapped[str] = mapped_column(String(64), default="")


class IdempotencyKey(Entity):
    """The stored reply to a POST with `Idempotency-Key`: the same key and body get the same reply, another body is refused."""

    __tablename__ = "idempotency_keys"

    user_id: Mapped[str] = mapped_column(ForeignKey("users.id", ondelete="CASCADE"), primary_key=True)
    key: Mapped[str] = mapped_column(String(255), primary_key=True)
    body_hash: Mapped[str] = mapped_column(String(64))
    status_code: Mapped[int]
    reply: Mapped[dict[str, Any]]
    created_at: Mapped[datetime] = mapped_column(default=now)
    location: Mapped[str] = mapped_column(Text, default="")
