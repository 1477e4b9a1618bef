"""Storage: who holds what, freeing an ended run's states before they expire, and having a deleted run back before the trash is emptied."""

from __future__ import annotations

from lohan_app.auth.repository import add_audit_entry
from lohan_app.auth.schemas import Identity
from lohan_app.context import AppContext
from lohan_app.db import read_transaction, write_transaction
from lohan_app.entities import TERMINAL_STATES, Run, RunKind
from lohan_app.errors import Conflict, NotFound
from lohan_app.runs.repository import chats_deleted_with, lock_run
from lohan_app.runs.schemas import RunDetail
from lohan_app.runs.service import check_at_rest, check_quota, get_run, visible
from lohan_app.storage import quota, repository
from lohan_app.storage.holdings import drives, holdings, trashed
from lohan_app.storage.report import occupied_bytes, read_report
from lohan_app.storage.retention import Expiry, rules_of, states_expiry
from lohan_app.storage.schemas import StorageView, UserUsage
from lohan_app.worker.celery import wake
from lohan_app.worker.run_files import put_aside_states, state_directories, take_from_trash


def overview(context: AppContext, identity: Identity) -> StorageView:
    """Drives as they are now, holdings as they were measured last; members see their own, administrators all."""
    settings, report = context.settings, read_report(context.settings)
    with read_transaction(context.engine) as session:
        found = holdings(session, settings, report) if report is not None else []
        users = repository.users(session, None if identity.is_admin else identity.user_id)
        usages = [
            UserUsage(
                user_id=user.id,
                user_name=user.name,
                bytes=quota.usage_of(session, report, user.id).bytes,
                quota_bytes=quota.quota_of(settings, user.role),
            )
            for user in users
        ]
        active = repository.active_runs(session)
        trash = trashed(session, settings, report, None if identity.is_admin else identity.user_id)
    return StorageView(
        measured_at=report.measured_at if report is not None else None,
        drives=drives(settings, active),
        holdings=[item for item in found if identity.is_admin or item.owner_id == identity.user_id],
        trash=trash,
        users=sorted(usages, key=lambda usage: (-usage.bytes, usage.user_name)),
    )


def states_expiry_of(context: AppContext, identity: Identity, run_id: str) -> Expiry | None:
    """When an ended run's states are removed by themselves, and why only then; None where it has none on the drives, or goes on.

    Raises:
        NotFound: there is no such run that this user may see.
    """
    with read_transaction(context.engine) as session:
        run = visible(session, identity, run_id).run
        if not any(folder.is_dir() for folder in state_directories(context.settings, run_id)):
            return None
        expiry = states_expiry(run, rules_of(context.settings))
        if expiry is not None and repository.waiting_for_states(session, [run_id]):
            return Expiry(expiry.at, "a retry that waits begins with them")
        return expiry


def restore(context: AppContext, identity: Identity, run_id: str) -> RunDetail:
    """Take a deleted run out of the trash, with its result, log and curve, and the chats that went with it. Restored twice is once.

    Its states are not in the trash: they were removed with the deletion.

    Raises:
        NotFound: there is no such run that this user may see.
        Conflict: the trash has been emptied, or the run is a chat with one that is deleted.
        QuotaExceeded: its owner's quota has no room for it any more.
    """
    settings = context.settings
    with write_transaction(context.engine) as session:
        run = lock_run(session, run_id)
        if run is None or not identity.may_see(run.owner_id):
            raise NotFound("no such run", place=run_id, remedy="Look at the trash on the storage page.")
        if run.deleted_at is not None:
            need_bytes = occupied_bytes(settings.data_dir / "trash" / run_id)
            check_quota(session, context, identity, run.owner_id, need_bytes)
            parent = session.get(Run, run.parent_id) if run.kind is RunKind.CHAT and run.parent_id is not None else None
            if parent is not None and parent.deleted_at is not None:
                raise Conflict("the run that the chat asked is deleted too", place=run_id, remedy=f"Restore {parent.id} first.")
            if not take_from_trash(settings, run_id):
                raise Conflict("the run's trash has been emptied: nothing is left of it", place=run_id, remedy="Start a new run.")
            for chat in chats_deleted_with(session, run):
                if take_from_trash(settings, chat.id):
                    chat.deleted_at = None
            run.deleted_at = None
            add_audit_entry(session, user_id=identity.user_id, action="run.restore", subject=run_id, address=identity.address)
    return get_run(context, identity, run_id)


def free_states(context: AppContext, identity: Identity, run_id: str) -> None:
    """Free what an ended run could be gone on from, before it expires; its result and log stay. Freed twice is freed once.

    Raises:
        NotFound: there is no such run that this user may see.
        Conflict: it has not ended, a retry or an export needs its states, or a process still works in its folder.
    """
    settings = context.settings
    with write_transaction(context.engine) as session:
        visible(session, identity, run_id)
        run = lock_run(session, run_id)
        assert run is not None, "rows of runs stay"
        if run.state not in TERMINAL_STATES:
            raise Conflict(f"the run is {run.state}, and goes on from its states", place=run_id, remedy="Cancel it first, or let it end.")
        if repository.waiting_for_states(session, [run_id], RunKind.TRAIN):
            raise Conflict("a retry that waits begins with these states", place=run_id, remedy="Cancel that run first.")
        if repository.waiting_for_states(session, [run_id], RunKind.EXPORT):
            raise Conflict("an export that waits reads these states", place=run_id, remedy="Cancel that run first.")
        check_at_rest(settings, run_id)
        add_audit_entry(session, user_id=identity.user_id, action="run.free-states", subject=run_id, address=identity.address)
        put_aside_states(settings, run_id)
    wake(settings)  # the reconciler removes what was put aside
