"""What one user may hold: counted from rows and the last measurement, so that no request walks over files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy.orm import Session

from lohan.errors import CapacityError
from lohan.planning.tiers import Tier
from lohan.units import format_bytes
from lohan_app.entities import TERMINAL_STATES, Dataset, Role, Run, RunKind, RunState
from lohan_app.runs.kinds import needs_of
from lohan_app.settings import Settings
from lohan_app.storage import repository
from lohan_app.storage.report import Kind, StorageReport, read_report

SHOWN = 3
"""How many of the largest things a refusal names."""


class QuotaExceeded(CapacityError):  # noqa: N818 - named as its problem type is
    """The user's quota has no room for this; `holders` names the largest things they could delete."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What a user holds, and the largest of it that could be deleted, in words."""

    bytes: int
    largest: dict[str, int]


def planned_bytes(plan: Mapping[str, Any] | None) -> int:
    """What a run with this plan is going to hold: its states on the drives, and its result."""
    plan = plan or {}
    states = sum(int(item["bytes"]) for tier in plan.get("tiers", ()) if tier["tier"] == Tier.SSD for item in tier["items"])
    return states + result_bytes(plan)


def result_bytes(plan: Mapping[str, Any]) -> int:
    """What the run's result takes in its folder: the working weights."""
    return int(plan.get("parameters", 0)) * (4 if plan.get("precision") == "fp32" else 2)


def usage_of(session: Session, report: StorageReport | None, user_id: str) -> Usage:
    """Datasets by their rows, runs by what was measured; of one that has not ended at least what its plan says. Drafts hold nothing."""
    runs, datasets = repository.owned(session, user_id)
    measured: dict[str, int] = {}
    for item in report.items if report is not None else ():
        if item.kind in (Kind.STATES, Kind.EXPORT, Kind.RUN_FILES):
            measured[item.id] = measured.get(item.id, 0) + item.bytes
    held = {run.id: _run_bytes(run, measured.get(run.id, 0)) for run in runs}
    return Usage(sum(held.values()) + sum(dataset.size_bytes for dataset in datasets), _largest(runs, datasets, held))


def _run_bytes(run: Run, measured: int) -> int:
    if run.state in TERMINAL_STATES or run.state is RunState.DRAFT:
        return measured
    return max(measured, planned_bytes(run.plan) if run.kind is RunKind.TRAIN else needs_of(run).result_bytes)


def _largest(runs: Sequence[Run], datasets: Sequence[Dataset], held: dict[str, int]) -> dict[str, int]:
    things = [(f"run {run.name!r}", held[run.id]) for run in runs if run.state in TERMINAL_STATES]
    things += [(f"dataset {dataset.name!r}", dataset.size_bytes) for dataset in datasets]
    things.sort(key=lambda thing: -thing[1])
    return {name: size for name, size in things[:SHOWN] if size}


def quota_of(settings: Settings, role: Role) -> int | None:
    """Administrators, who set it, have none."""
    return None if role is Role.ADMIN else settings.user_quota_bytes


def left(session: Session, settings: Settings, *, user_id: str, role: Role) -> int | None:
    """Bytes that the user may still take; None where there is no limit."""
    quota = quota_of(settings, role)
    return None if quota is None else max(0, quota - usage_of(session, read_report(settings), user_id).bytes)


def check(session: Session, settings: Settings, *, user_id: str, role: Role, need_bytes: int, what: str) -> None:
    """Refuse what would take a user beyond the quota.

    Args:
        need_bytes: what `what` (as `the run`) is going to take beside what is there.

    Raises:
        QuotaExceeded: with need, have, and the largest things that the user could delete.
    """
    quota = quota_of(settings, role)
    if quota is None:
        return
    usage = usage_of(session, read_report(settings), user_id)
    have = max(0, quota - usage.bytes)
    if need_bytes <= have:
        return
    raise _refusal(f"{what} needs {format_bytes(need_bytes)}", need_bytes, quota, usage)


def more_than_left(session: Session, settings: Settings, *, user_id: str, role: Role) -> QuotaExceeded:
    """The refusal of a file that is found to be larger than what is left while it arrives."""
    quota, usage = quota_of(settings, role), usage_of(session, read_report(settings), user_id)
    assert quota is not None, "without a quota nothing is larger than what is left of it"
    return _refusal("the file is larger", max(0, quota - usage.bytes) + 1, quota, usage)


def _refusal(words: str, need_bytes: int, quota: int, usage: Usage) -> QuotaExceeded:
    have = max(0, quota - usage.bytes)
    named = ", ".join(f"{name} ({format_bytes(size)})" for name, size in usage.largest.items())
    return QuotaExceeded(
        f"{words}, and of the quota of {format_bytes(quota)} {format_bytes(have)} are left",
        need_bytes=need_bytes,
        have_bytes=have,
        holders=usage.largest,
        place="quota",
        remedy=f"Delete what is no longer needed: {named}." if named else "Ask an administrator for more (LOHAN_USER_QUOTA_BYTES).",
    )
