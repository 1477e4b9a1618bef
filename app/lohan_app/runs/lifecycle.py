"""What people ask of runs that exist: pause, resume, stop, cancel, kill, submit, retry, clone, delete. What is allowed: `runs.requests`.

Each request is one transaction that holds the run's row: what it was decided by is still so when it is written.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any

from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from lohan.config import Durability, Precision
from lohan_app.auth.repository import add_audit_entry
from lohan_app.auth.schemas import Identity
from lohan_app.base_models import repository as base_models
from lohan_app.context import AppContext
from lohan_app.datasets import repository as datasets
from lohan_app.db import read_transaction, write_transaction
from lohan_app.entities import TERMINAL_STATES, PauseCause, Run, RunKind, RunState, Wanted
from lohan_app.entities.base import now
from lohan_app.errors import Conflict, Forbidden
from lohan_app.runs import chats, exports, repository, service
from lohan_app.runs.announce import announce
from lohan_app.runs.kinds import needs_of
from lohan_app.runs.once import Answer, once
from lohan_app.runs.requests import UNKNOWN, Effect, Request, allowed, effect_of, wanted_after_kill, wanted_by
from lohan_app.runs.schemas import RunDetail, RunRequest
from lohan_app.runs.states import Trigger
from lohan_app.storage.quota import planned_bytes
from lohan_app.storage.retention import KEEP_STATES_DAYS, durability_of
from lohan_app.worker.celery import send, wake
from lohan_app.worker.run_files import move_deleted_to_trash, states_bytes

log = logging.getLogger(__name__)

NAME_CHARACTERS = 255
TRIGGERS = {
    Request.PAUSE: Trigger.REQUEST_PAUSE,
    Request.CANCEL: Trigger.REQUEST_CANCEL,
    Request.RESUME: Trigger.RESUME,
    Request.STOP: Trigger.RESUME,
    Request.SUBMIT: Trigger.SUBMIT,
}
"""What a request that moves the run at once fires."""
# What a request that moves the run at once writes besides.
_VALUES: dict[Request, dict[str, Any]] = {
    Request.CANCEL: {"state_reason": "", "phase_progress": None},
    Request.PAUSE: {"state_reason": ""},
    Request.RESUME: {"state_reason": "", "problem": None, "start_after": None},
    Request.STOP: {"state_reason": "Goes on only to bring its result.", "problem": None, "start_after": None},
    Request.SUBMIT: {"state_reason": ""},
}


def ask(context: AppContext, identity: Identity, run_id: str, request: Request, idempotency_key: str | None = None) -> Answer:
    """Pause, resume, stop, cancel, kill or submit the run. One that nobody works on is moved at once; otherwise its supervisor acts.

    Raises:
        NotFound: there is no such run that this user may see.
        Conflict: the run's state does not allow it; the message names the state, the remedy what is allowed.
        Unprocessable: the idempotency key is malformed, or was used for another request.
        LohanError: a draft does not fit, its owner's quota has no room for it, or what it is made of is gone (see `service.plan`).
    """
    changes = _made_ready(context, identity, run_id) if request is Request.SUBMIT else {}

    def work(session: Session) -> str:
        run = _held(session, identity, run_id)
        if changes:
            service.check_quota(session, context, identity, run.owner_id, planned_bytes(changes["plan"]))
        apply(session, identity, run, request, changes)
        return run_id

    answer = once(context, identity, f"{request} {run_id}", idempotency_key, work)
    if answer.is_replay:
        return answer
    if answer.run.state is RunState.QUEUED and answer.run.prepared_at is None:
        send("runs.prepare", run_id, settings=context.settings)
    announce(context.settings, run_id)
    wake(context.settings)
    return answer


def apply(session: Session, identity: Identity, run: Run, request: Request, changes: dict[str, Any]) -> None:
    """Do what `request` does to a run whose row is held; `changes` are columns that go with a move.

    Raises:
        Conflict: see `ask`; nothing was changed.
    """
    effect = effect_of(request, run.state, run.wanted, run.kind)
    if effect is None:
        raise _refused(run, request)
    if effect is Effect.NOTHING:
        return
    if request is Request.STOP:
        _check_has_result(run)
    add_audit_entry(session, user_id=identity.user_id, action=f"run.{request}", subject=run.id, address=identity.address)
    if effect is Effect.KILL:
        run.kill_attempt = run.attempt
        run.wanted = wanted_after_kill(run.kind, run.wanted)
    elif request is not Request.SUBMIT:
        run.wanted = wanted_by(request)
    if effect is Effect.ASK and run.state is RunState.PAUSED:
        run.pause_cause, run.state_reason = PauseCause.REQUEST, ""
    session.flush()
    if effect is Effect.NOW:
        moved = repository.fire(session, run.id, TRIGGERS[request], only_from=run.state, **_VALUES[request], **changes)
        assert moved is not None, "its row is held"


def _held(session: Session, identity: Identity, run_id: str) -> Run:
    """The run, its row held until the transaction ends."""
    service.visible(session, identity, run_id)
    run = repository.lock_run(session, run_id)
    assert run is not None, "rows of runs stay"
    return run


def _refused(run: Run, request: Request) -> Conflict:
    being = " and being cancelled" if run.wanted is Wanted.CANCEL and run.state not in TERMINAL_STATES else ""
    message = f"the run is {run.state}{being}: {request} is not possible"
    unknown = UNKNOWN[run.kind].get(request)
    if unknown is not None:
        message += f" of a run of kind {run.kind}: {unknown}"
    possible = ", ".join(allowed(run)) or "nothing"
    return Conflict(message, place=run.id, remedy=f"Allowed now: {possible}.")


def _check_has_result(run: Run) -> None:
    if run.step == 0:
        raise Conflict("the run has done no step: there is nothing to keep", place=run.id, remedy="Wait for its first step, or cancel it.")
    if run.state is RunState.PAUSED and durability_of(run) is Durability.NONE:
        remedy = "Resume it to begin again, or cancel it."
        raise Conflict("the run keeps nothing to go on from (durability none): what it has learned is gone", place=run.id, remedy=remedy)


def set_priority(context: AppContext, identity: Identity, run_id: str, priority: int) -> RunDetail:
    """Have a run that has not ended start before those with a lower priority; whoever calls this has seen that an administrator asks.

    Raises:
        NotFound: see `ask`.
        Conflict: the run has ended.
    """
    with write_transaction(context.engine) as session:
        run = _held(session, identity, run_id)
        if run.state in TERMINAL_STATES:
            raise Conflict(f"the run is {run.state}: it is in no queue any more", place=run_id, remedy="Set the priority of its retry.")
        run.priority = priority
        add_audit_entry(session, user_id=identity.user_id, action="run.priority", subject=run_id, address=identity.address)
        session.flush()
        changed = service.detail(session, service.visible(session, identity, run_id))
    announce(context.settings, run_id)
    wake(context.settings)
    return changed


# ---------------------------------------------------------------- other runs made of this one
def _request_of(run: Run) -> RunRequest:
    """The submission that the run was, or would be."""
    return RunRequest.model_validate(
        {
            "name": run.name,
            "base_model_id": run.base_model_id,
            "dataset_id": run.dataset_id,
            "skip_bad_rows": run.skip_bad_rows,
            "training": run.settings.get("training", {}),
            "engine": run.settings.get("engine", {}),
            KEEP_STATES_DAYS: run.settings.get(KEEP_STATES_DAYS),
        }
    )


def _made_ready(context: AppContext, identity: Identity, run_id: str) -> dict[str, Any]:
    """The columns that a draft needs to be queued: a plan for the machine as it is now."""
    with read_transaction(context.engine) as session:
        run = service.visible(session, identity, run_id).run
    if run.state is not RunState.DRAFT:
        return {}
    request = _request_of(run)
    with read_transaction(context.engine) as session:
        service.check_parts(session, identity, request)
    plan = service.plan(context, identity, request)
    training = request.training.model_copy(update={"precision": Precision(plan.precision)})
    return {"plan": plan.model_dump(mode="json"), "settings": service.settings_of(request, training)}


def retry(context: AppContext, identity: Identity, run_id: str, idempotency_key: str | None = None) -> Answer:
    """Queue a run with the same settings that goes on from what this one has recorded, where it has recorded anything.

    Raises:
        NotFound, Unprocessable: see `ask`.
        Conflict: the run has not failed or been cancelled, is being retried already, or its model or dataset is gone.
    """

    def work(session: Session) -> str:
        run = _held(session, identity, run_id)
        if effect_of(Request.RETRY, run.state, run.wanted, run.kind) is None:
            raise _refused(run, Request.RETRY)
        other = repository.unfinished_retry(session, run_id)
        if other is not None:
            raise Conflict(f"the run is being retried by {other}", place=run_id, remedy="Wait for that run, or cancel it.")
        columns = _again(session, context, identity, run)
        return _add(session, identity, run, RunState.QUEUED, owner_id=run.owner_id, name=run.name, **columns)

    answer = once(context, identity, f"retry {run_id}", idempotency_key, work)
    if not answer.is_replay:
        if answer.run.prepared_at is None:
            send("runs.prepare", answer.run.id, settings=context.settings)
        wake(context.settings)
    return answer


def _again(session: Session, context: AppContext, identity: Identity, run: Run) -> dict[str, Any]:
    """The columns of a run that does again what this one was to do; raises as `retry`."""
    if run.kind is RunKind.TRAIN:
        service.check_parts(session, identity, _request_of(run))
        # It takes over what its parent has on the drives, which its owner holds already.
        need_bytes = planned_bytes(run.plan) - states_bytes(context.settings, run.id)
        columns: dict[str, Any] = {"parent_id": run.id, "plan": run.started_plan or run.plan}  # by which its states are laid out
    else:
        need_bytes = needs_of(run).result_bytes
        columns = {"parent_id": run.id, "plan": None, "prepared_at": now()}
    if run.kind is RunKind.PROFILE and not identity.is_admin:
        raise Forbidden("only administrators measure the machine", place=run.id, remedy="Ask an administrator.")
    if run.kind is RunKind.EXPORT:
        assert run.parent_id is not None, "the database checks it"
        exports.check_source(session, context.settings, repository.lock_run(session, run.parent_id))
        columns["parent_id"] = run.parent_id
    if run.kind is RunKind.CHAT:
        chats.check_again(session, context, run)
        columns["parent_id"] = run.parent_id
    service.check_quota(session, context, identity, run.owner_id, need_bytes)
    return columns


def clone(context: AppContext, identity: Identity, run_id: str, idempotency_key: str | None = None) -> Answer:
    """Make a draft with the run's settings; nothing is queued.

    Raises:
        NotFound, Unprocessable: see `ask`.
        Conflict: the run is no training, or its model or dataset is gone.
    """

    def work(session: Session) -> str:
        run = _held(session, identity, run_id)
        if effect_of(Request.CLONE, run.state, run.wanted, run.kind) is None:
            raise _refused(run, Request.CLONE)
        service.check_parts(session, identity, _request_of(run))
        name = f"Copy of {run.name}"[:NAME_CHARACTERS]
        return _add(session, identity, run, RunState.DRAFT, owner_id=identity.user_id, name=name, plan=None, parent_id=None)

    return once(context, identity, f"clone {run_id}", idempotency_key, work)


def _add(session: Session, identity: Identity, source: Run, state: RunState, **columns: Any) -> str:
    made = Run(
        kind=source.kind,
        base_model_id=source.base_model_id,
        dataset_id=source.dataset_id,
        skip_bad_rows=source.skip_bad_rows,
        settings=source.settings,
        state=state,
        queued_at=now() if state is RunState.QUEUED else None,
        devices=[],
        **columns,
    )
    # Held, so that neither can be deleted before this run is there to need them.
    if source.base_model_id is not None:
        base_models.get_locked(session, source.base_model_id)
    if source.dataset_id is not None:
        datasets.get_locked(session, source.dataset_id)
    session.add(made)
    session.flush()
    action = "run.retry" if state is RunState.QUEUED else "run.clone"
    add_audit_entry(session, user_id=identity.user_id, action=action, subject=made.id, address=identity.address)
    return made.id


# ---------------------------------------------------------------- deletion
def delete(context: AppContext, identity: Identity, run_id: str) -> None:
    """Delete a run that has ended, or a draft: its files go into the trash, and nobody sees it until it is restored (`storage.service`).

    Chats with its result go with it.

    Raises:
        NotFound: see `ask`.
        Conflict: it has not ended, a process still works in its folder, an export has yet to read its states, or a chat its result.
    """
    with write_transaction(context.engine) as session:
        run = _held(session, identity, run_id)
        if effect_of(Request.DELETE, run.state, run.wanted, run.kind) is None:
            raise _refused(run, Request.DELETE)
        service.check_at_rest(context.settings, run_id)
        export = repository.unfinished_exports(session).get(run_id)
        if export is not None:
            raise Conflict(f"the run {export.name!r} is to read its states", place=run_id, remedy="Wait for that run, or cancel it.")
        chat = repository.unfinished_chat(session, run_id)
        if chat is not None:
            raise Conflict(f"the chat {chat.id} asks its result", place=run_id, remedy="Wait for the answer, or cancel that run.")
        if run.state is RunState.DRAFT:
            repository.fire(session, run_id, Trigger.REQUEST_CANCEL)
        others = repository.mark_deleted(session, run_id, now())
        add_audit_entry(session, user_id=identity.user_id, action="run.delete", subject=run_id, address=identity.address)
        # What was said in a chat is removed when its trash is: there has to be some, also of one that never began.
        for chat_id in (*others, *([run_id] if run.kind is RunKind.CHAT else [])):
            with suppress(OSError):
                context.settings.run_folder(chat_id).mkdir(mode=0o700, parents=True, exist_ok=True)
    for deleted in (run_id, *others):
        try:
            with write_transaction(context.engine) as session:
                move_deleted_to_trash(session, context.settings, deleted)
        except (OSError, DBAPIError):
            log.exception("%s: its folder stays until the worker's next start", deleted)
    wake(context.settings)
