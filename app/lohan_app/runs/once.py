"""Requests that are acted on once: what they change and the reply to their idempotency key are one transaction."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from lohan_app.auth.repository import add_audit_entry
from lohan_app.auth.schemas import Identity
from lohan_app.context import AppContext
from lohan_app.db import read_transaction, write_transaction
from lohan_app.entities import IdempotencyKey, Run, RunState
from lohan_app.entities.base import now
from lohan_app.errors import Conflict
from lohan_app.runs import queries, service
from lohan_app.runs.service import Submission
from lohan_app.worker.celery import wake

NAME_CHARACTERS = 255
"""Of a run; longer names are cut."""
Answer = Submission
"""The run as the request has left it, or as the same request, by its idempotency key, found it before."""


def once(context: AppContext, identity: Identity, body: str, key: str | None, work: Callable[[Session], str]) -> Answer:
    """Do `work` in one transaction with the reply's idempotency key, or give the reply that this key got before.

    Args:
        body: what is asked for, in words that no other request has.
        work: returns the id of the run to reply with.

    Raises:
        Unprocessable: the idempotency key is malformed, or was used for another request.
        Exception: whatever `work` raises; nothing was changed.
    """
    service.check_key(key)
    body_hash = hashlib.sha256(body.encode()).hexdigest()
    try:
        with write_transaction(context.engine) as session:
            answered = service.earlier_answer(session, identity, key, body_hash)
            if answered is not None:
                return answered
            run_id = work(session)
            session.flush()
            session.expire_all()
            named = queries.named_run(session, run_id)
            assert named is not None, "it was held or made in this transaction"
            detail = service.detail(session, named)
            if key is not None:
                reply = detail.model_dump(mode="json")
                queries.store_reply(
                    session, IdempotencyKey(user_id=identity.user_id, key=key, body_hash=body_hash, status_code=200, reply=reply)
                )
            return Answer(detail, is_replay=False)
    except (IntegrityError, Conflict):
        # The same key at the same time on PostgreSQL: the other request was first, and its reply is this one's too.
        with read_transaction(context.engine) as session:
            answered = service.earlier_answer(session, identity, key, body_hash)
        if answered is None:
            raise
        return answered


def queue_once(
    context: AppContext, identity: Identity, body: str, key: str | None, make: Callable[[Session], Run], *, action: str
) -> Answer:
    """`once` for a run that is no training: it comes into line, with an audit entry for `action`, and the worker is woken.

    Args:
        make: the run with its kind, owner, name, settings, and what it is made of; see `once` for what it may raise.
    """

    def work(session: Session) -> str:
        run = make(session)
        run.name, run.state, run.devices = run.name[:NAME_CHARACTERS], RunState.QUEUED, []
        run.queued_at = run.prepared_at = now()
        session.add(run)
        session.flush()
        add_audit_entry(session, user_id=identity.user_id, action=action, subject=run.id, address=identity.address)
        return run.id

    answer = once(context, identity, body, key, work)
    if not answer.is_replay:
        wake(context.settings)
    return answer
