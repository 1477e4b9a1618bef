"""Queries on users, sessions, keys and the audit log."""

from __future__ import annotations

from datetime import datetime, timedelta

from sqlalchemy import delete, func, select, update
from sqlalchemy.orm import Session

from lohan_app.entities import ApiKey, AuditEntry, BrowserSession, SetupClaim, User
from lohan_app.entities.base import now

# A column of "last seen" needs no finer grain, and a write per request would queue behind SQLite's one writer.
SEEN_GRAIN = timedelta(minutes=1)


def setup_is_claimed(session: Session) -> bool:
    return session.get(SetupClaim, 1) is not None


def user_by_name(session: Session, name: str) -> User | None:
    """The user of that name, however it is spelled in upper and lower case."""
    return session.scalar(select(User).where(func.lower(User.name) == name.lower()))


def session_with_user(session: Session, token_hash: str) -> tuple[BrowserSession, User] | None:
    row = session.execute(
        select(BrowserSession, User).join(User, User.id == BrowserSession.user_id).where(BrowserSession.token_hash == token_hash)
    ).one_or_none()
    return (row[0], row[1]) if row else None


def sessions_of(session: Session, user_id: str) -> list[BrowserSession]:
    return list(
        session.scalars(select(BrowserSession).where(BrowserSession.user_id == user_id).order_by(BrowserSession.last_seen_at.desc()))
    )


def delete_session(session: Session, session_id: str, *, user_id: str) -> bool:
    """Whether there was such a session of that user."""
    deleted = session.execute(
        delete(BrowserSession).where(BrowserSession.id == session_id, BrowserSession.user_id == user_id).returning(BrowserSession.id)
    )
    return deleted.first() is not None


def delete_sessions_of(session: Session, user_id: str) -> None:
    session.execute(delete(BrowserSession).where(BrowserSession.user_id == user_id))


def delete_sessions_before(session: Session, moment: datetime) -> None:
    session.execute(delete(BrowserSession).where(BrowserSession.last_seen_at < moment))


def touch_session(session: Session, session_id: str) -> None:
    session.execute(update(BrowserSession).where(BrowserSession.id == session_id).values(last_seen_at=now()))


def key_with_user(session: Session, key_id: str) -> tuple[ApiKey, User] | None:
    row = session.execute(select(ApiKey, User).join(User, User.id == ApiKey.user_id).where(ApiKey.id == key_id)).one_or_none()
    return (row[0], row[1]) if row else None


def keys_of(session: Session, user_id: str) -> list[ApiKey]:
    """The user's keys that are not revoked, newest first."""
    return list(session.scalars(select(ApiKey).where(ApiKey.user_id == user_id, ApiKey.revoked_at.is_(None)).order_by(ApiKey.id.desc())))


def revoke_key(session: Session, key_id: str, *, user_id: str) -> bool:
    """Whether there was such a key of that user, not revoked yet."""
    revoked = session.execute(
        update(ApiKey)
        .where(ApiKey.id == key_id, ApiKey.user_id == user_id, ApiKey.revoked_at.is_(None))
        .values(revoked_at=now())
        .returning(ApiKey.id)
    )
    return revoked.first() is not None


def touch_key(session: Session, key_id: str) -> None:
    session.execute(update(ApiKey).where(ApiKey.id == key_id).values(last_used_at=now()))


def is_stale(seen: datetime | None) -> bool:
    """Whether a "last seen" time is old enough to be written again."""
    return seen is None or now() - seen >= SEEN_GRAIN


def add_audit_entry(session: Session, *, user_id: str | None, action: str, subject: str = "", address: str = "") -> None:
    """Record who did what, in the transaction that does it."""
    session.add(AuditEntry(user_id=user_id, action=action, subject=subject[:255], address=address[:64]))
