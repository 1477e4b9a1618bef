"""Curves: what a run measured in its steps, a bucket of steps at a time, aggregated by the database.

200,000 steps of ten numbers are never read into this process. `run_curves` holds every 32 steps of each number in one row, kept up by
whoever stores steps (`refresh`); what a page asks for is merged from these rows, and from the steps themselves where it looks closer.
Without the table SQLite took 0.8 s and PostgreSQL 0.25 s for all numbers of 200,000 steps (2 busy cores), which is too long for a page.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import CTE, Double, Row, Select, case, cast, delete, func, insert, literal, null, select, union_all
from sqlalchemy.orm import Session

from lohan_app.entities import Metric, RunCurve, RunMetric

SUMMARY_STEPS = 32
"""Steps in a row of `run_curves`: 200,000 steps are 6,250 rows a curve, and a look that needs the steps themselves reads 12,800 at most."""
SUM_LIMIT = 1e290
"""Larger values count as this one in a mean: 2**31 of them still have a finite sum, and PostgreSQL raises an error where one is not."""
_COLUMNS = [column.name for column in RunCurve.__table__.columns]
_PIECE = _COLUMNS[3:]
"""Those that are merged: all besides run, number and bucket."""


def bucket_steps(first_step: int, last_step: int, buckets: int) -> int:
    """Steps in a bucket, so that the range lies in at most `buckets` of them; each begins at a multiple of it."""
    width = max(1, -(-(last_step - first_step + 1) // buckets))
    unit = SUMMARY_STEPS if width >= SUMMARY_STEPS else 1
    width = -(-width // unit) * unit
    while last_step // width - first_step // width >= buckets:
        width += unit
    return width


def read(session: Session, run_id: str, metrics: Sequence[Metric], *, first_step: int, last_step: int, width: int) -> Sequence[Row[Any]]:
    """Rows of the columns of `RunCurve`, one for each number and bucket of `width` steps that holds a step, in order; one query.

    Args:
        first_step, last_step: the range, both in it.
        width: from `bucket_steps`.
    """
    parts = [_merged(run_id, metric, first_step=first_step, last_step=last_step, width=width) for metric in metrics]
    every = union_all(*parts).subquery()
    return session.execute(select(every).order_by(every.c.metric, every.c.bucket)).all()


def refresh(session: Session, run_id: str, *, first_step: int, last_step: int) -> None:
    """Bring the summary up to date with the steps from `first_step` to `last_step`, which were written or deleted in this transaction."""
    first, last = first_step // SUMMARY_STEPS, last_step // SUMMARY_STEPS
    session.execute(
        delete(RunCurve).where(RunCurve.run_id == run_id, RunCurve.bucket.between(first, last)).execution_options(synchronize_session=False)
    )
    steps = {"first_step": first * SUMMARY_STEPS, "last_step": (last + 1) * SUMMARY_STEPS - 1}
    parts = [_merged(run_id, metric, **steps, width=SUMMARY_STEPS, from_summary=False) for metric in Metric]
    session.execute(insert(RunCurve).from_select(_COLUMNS, union_all(*parts)))


def _merged(run_id: str, metric: Metric, *, first_step: int, last_step: int, width: int, from_summary: bool = True) -> Select[Any]:
    """The columns of `RunCurve` for each bucket of `width` steps of one number."""
    sources = _sources(run_id, metric, first_step, last_step, from_summary=from_summary and width >= SUMMARY_STEPS)
    parts = union_all(*sources).subquery()
    pieces = select(parts, (parts.c.first_step // width).label("bucket")).cte()
    whole = _totals(pieces)
    # Where an extreme lies is asked in a second pass over the pieces; the databases share no aggregate that gives it in the first.
    return (
        select(
            literal(run_id).label("run_id"),
            literal(str(metric)).label("metric"),
            whole.c.bucket,
            whole.c.first_step,
            whole.c.last_step,
            whole.c.steps,
            whole.c.finite_steps,
            whole.c.total,
            func.max(case((pieces.c.first_step == whole.c.first_step, pieces.c.first_value))).label("first_value"),
            func.max(case((pieces.c.last_step == whole.c.last_step, pieces.c.last_value))).label("last_value"),
            whole.c.minimum,
            func.min(case((pieces.c.minimum == whole.c.minimum, pieces.c.minimum_step))).label("minimum_step"),
            whole.c.maximum,
            func.min(case((pieces.c.maximum == whole.c.maximum, pieces.c.maximum_step))).label("maximum_step"),
            whole.c.gap_step,
        )
        .select_from(whole.join(pieces, pieces.c.bucket == whole.c.bucket))
        .group_by(*whole.c)
    )


def _totals(pieces: CTE) -> CTE:
    return (
        select(
            pieces.c.bucket,
            func.min(pieces.c.first_step).label("first_step"),
            func.max(pieces.c.last_step).label("last_step"),
            func.sum(pieces.c.steps).label("steps"),
            func.sum(pieces.c.finite_steps).label("finite_steps"),
            func.sum(pieces.c.total).label("total"),
            func.min(pieces.c.minimum).label("minimum"),
            func.max(pieces.c.maximum).label("maximum"),
            func.min(pieces.c.gap_step).label("gap_step"),
        )
        .group_by(pieces.c.bucket)
        .cte()
    )


def _sources(run_id: str, metric: Metric, first_step: int, last_step: int, *, from_summary: bool) -> list[Select[Any]]:
    """What the buckets are made of: rows of the summary, and at the range's ends (without a summary: throughout) single steps."""
    first_whole, end_whole = -(-first_step // SUMMARY_STEPS), (last_step + 1) // SUMMARY_STEPS
    if not from_summary or end_whole <= first_whole:
        return [_steps(run_id, metric, first_step, last_step)]
    sources = [_summary(run_id, metric, first_whole, end_whole - 1)]
    if first_step < first_whole * SUMMARY_STEPS:
        sources.append(_steps(run_id, metric, first_step, first_whole * SUMMARY_STEPS - 1))
    if last_step >= end_whole * SUMMARY_STEPS:
        sources.append(_steps(run_id, metric, end_whole * SUMMARY_STEPS, last_step))
    return sources


def _summary(run_id: str, metric: Metric, first_bucket: int, last_bucket: int) -> Select[Any]:
    return select(*(getattr(RunCurve, name) for name in _PIECE)).where(
        RunCurve.run_id == run_id, RunCurve.metric == str(metric), RunCurve.bucket.between(first_bucket, last_bucket)
    )


def _steps(run_id: str, metric: Metric, first_step: int, last_step: int) -> Select[Any]:
    """Each step as if it were a row of the summary."""
    value, step = cast(getattr(RunMetric, metric), Double), RunMetric.step
    summed = case((value > SUM_LIMIT, SUM_LIMIT), (value < -SUM_LIMIT, -SUM_LIMIT), else_=value)
    is_finite = case((value.is_(None), 0), else_=1)
    columns = {
        "first_step": step,
        "last_step": step,
        "steps": literal(1),
        "finite_steps": is_finite,
        "total": summed,
        "first_value": value,
        "last_value": value,
        "minimum": value,
        "minimum_step": step,
        "maximum": value,
        "maximum_step": step,
        "gap_step": case((value.is_(None), step), else_=null()),
    }
    labelled: list[Any] = [columns[name].label(name) for name in _PIECE]
    return select(*labelled).where(RunMetric.run_id == run_id, step.between(first_step, last_step))
