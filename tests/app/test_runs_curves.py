"""Curves of long runs: equal to a plain reading of every step, in few queries, few points and few bytes."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
from benchmarks.service import counted, fill_run
from fixtures.runs import make_run, read_metrics
from fixtures.service import Person
from sqlalchemy import Engine, select

from lohan.events import Event, EventType
from lohan_app.db import read_transaction, write_transaction
from lohan_app.entities import Metric, RunCurve, RunMetric, RunState
from lohan_app.runs import curves, repository
from lohan_app.runs.curves import SUMMARY_STEPS, bucket_steps
from lohan_app.runs.service import CURVE_BUCKETS, POINTS_LIMIT
from lohan_app.settings import Settings

STEPS = 200_000


@pytest.fixture
def run_id(settings: Settings, engine: Engine, owner: Person) -> str:
    """A run of `owner`'s, who is the only user so far."""
    return make_run(settings, engine, state=RunState.RUNNING, attempt=1, epoch=1)


def step_event(step: int, attempt: int, seq: int, loss: float | None) -> Event:
    """As a trainer writes it, its other numbers derived from the step."""
    fields: dict[str, Any] = {
        "step": step,
        "loss": loss,
        "learning_rate": 1e-3 / step,
        "gradient_norm": None if step % 11 == 0 else step % 7,
    }
    fields |= {"tokens": step % 5, "tokens_per_second": 1e4 / (1 + step % 3), "step_seconds": 0.5, "epoch": step / 100}
    fields |= {"clip_rate": (step % 10) / 10, "device_peak_bytes": 2**34 + step}
    return Event(attempt=attempt, seq=seq, time=1e9 + seq, type=EventType.STEP, fields=fields)


def record(engine: Engine, run_id: str, events: list[Event]) -> None:
    with write_transaction(engine) as session:
        repository.record_events(session, run_id, epoch=1, events=events, offset_bytes=0, malformed=0)


def random_run(engine: Engine, run_id: str, seed: int, steps: int) -> None:
    """Steps with gaps, spikes and holes in batches of random sizes; a resumed attempt does the last third again."""
    numbers = random.Random(seed)  # noqa: S311 - curves, not secrets

    def losses(first: int, attempt: int) -> list[Event]:
        found = []
        for step in range(first, steps + 1):
            if numbers.random() < 0.02:
                continue
            loss = None if numbers.random() < 0.05 else numbers.choice([1.0, 2.0, 1e308, -1e308, numbers.random()])
            found.append(step_event(step, attempt, len(found) + 2, loss))
        return found

    resumed = 2 * steps // 3
    for attempt, first in ((1, 1), (2, resumed + 1)):
        fields = {"resumed_step": first - 1, "total_steps": steps}
        events = [Event(attempt=attempt, seq=1, time=1e9, type=EventType.STARTED, fields=fields), *losses(first, attempt)]
        while events:
            size = numbers.randint(1, steps // 3)
            record(engine, run_id, events[:size])
            events = events[size:]


def reference(rows: list[RunMetric], metric: Metric, first: int, last: int, width: int) -> list[dict[str, Any]]:
    """What `curves.read` promises, by reading every step."""
    buckets: dict[int, list[tuple[int, float | None]]] = {}
    for row in rows:
        if first <= row.step <= last:
            buckets.setdefault(row.step // width, []).append((row.step, getattr(row, metric)))
    found = []
    for bucket, points in sorted(buckets.items()):
        finite = [(value, step) for step, value in points if value is not None]
        lowest = min(finite, default=(None, None))
        highest = max(finite, key=lambda pair: (pair[0], -pair[1]), default=(None, None))
        found.append(
            {
                "metric": str(metric),
                "bucket": bucket,
                "first_step": points[0][0],
                "last_step": points[-1][0],
                "steps": len(points),
                "finite_steps": len(finite),
                "first_value": points[0][1],
                "last_value": points[-1][1],
                "minimum": lowest[0],
                "minimum_step": lowest[1],
                "maximum": highest[0],
                "maximum_step": highest[1],
                "gap_step": next((step for step, value in points if value is None), None),
                "total": sum(min(max(value, -curves.SUM_LIMIT), curves.SUM_LIMIT) for value, _ in finite) if finite else None,
            }
        )
    return found


def assert_equal(rows: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    assert len(rows) == len(wanted)
    for row, want in zip(rows, wanted, strict=True):
        total, wanted_total = row.pop("total"), want.pop("total")
        assert row.pop("run_id")
        assert row == want
        if wanted_total is None:
            assert total is None
        else:
            # Sums in another order: n additions of numbers no larger than m differ by n * n * m / 2**53 at most.
            size = max(abs(want["minimum"]), abs(want["maximum"]))
            assert math.isfinite(total)
            bound = want["finite_steps"] ** 2 * min(size, curves.SUM_LIMIT) * 2.0**-53
            assert abs(total - wanted_total) <= bound


@pytest.mark.database
@pytest.mark.parametrize("seed", [1, 2])
def test_every_range_and_width_equals_a_reading_of_all_steps(engine: Engine, run_id: str, seed: int):
    random_run(engine, run_id, seed, steps=700)
    rows = read_metrics(engine, run_id)
    ranges = [(rows[0].step, rows[-1].step), (1, 700), (33, 64), (32, 95), (40, 50), (31, 500), (650, 2**31 - 1), (701, 900)]
    metrics = (Metric.LOSS, Metric.GRADIENT_NORM, Metric.HOST_BYTES, Metric.DEVICE_PEAK_BYTES)
    with read_transaction(engine) as session:
        for (first, last), width in itertools.product(ranges, (1, 7, SUMMARY_STEPS, 5 * SUMMARY_STEPS)):
            extent = {"first_step": first, "last_step": last, "width": width}
            wanted = {metric: reference(rows, metric, first, last, width) for metric in metrics}
            together = curves.read_envelopes(session, run_id, metrics, **extent)
            for metric in metrics:
                found = [dict(row._mapping) for row in curves.read(session, run_id, [metric], **extent)]
                envelopes = [row._asdict() for row in together if row.metric == metric]
                # The same, less the places: these are of the other reading.
                assert_equal(
                    [row | envelope for row, envelope in zip(found, envelopes, strict=True)], [dict(row) for row in wanted[metric]]
                )
                assert_equal(found, wanted[metric])


@pytest.mark.database
def test_the_summary_holds_what_the_steps_say_whatever_came_in_which_order(engine: Engine, run_id: str):
    random_run(engine, run_id, 3, steps=400)
    # What an undone step says comes late, and the same stretch twice.
    record(engine, run_id, [step_event(390, 1, 500, 77.0), step_event(10, 1, 11, -3.0), step_event(10, 1, 11, -3.0)])
    rows = read_metrics(engine, run_id)
    with read_transaction(engine) as session:
        query = select(*RunCurve.__table__.c).where(RunCurve.run_id == run_id).order_by(RunCurve.metric, RunCurve.bucket)
        stored = [dict(row._mapping) for row in session.execute(query)]
    wanted = [bucket for metric in sorted(Metric) for bucket in reference(rows, metric, 1, 400, SUMMARY_STEPS)]
    assert_equal(stored, wanted)
    assert {row.attempt for row in rows if row.step > 266} == {2}


@pytest.mark.parametrize("limit", [50, 400, 666])
def test_a_range_lies_in_no_more_buckets_than_asked_for(limit: int):
    numbers = random.Random(limit)  # noqa: S311
    for _ in range(500):
        first = numbers.randint(1, 2**31 - 2)
        last = min(first + int(2 ** numbers.uniform(0, 31)), 2**31 - 1)
        width = bucket_steps(first, last, limit)
        assert last // width - first // width < limit
        assert width < SUMMARY_STEPS or width % SUMMARY_STEPS == 0
    assert bucket_steps(0, 0, limit) == 1


@pytest.mark.database
def test_two_million_values_open_in_few_queries_points_and_bytes(app, engine: Engine, owner: Person, run_id: str):
    fill_run(engine, run_id, STEPS)
    with counted(app.state.context.engine) as page_statements:
        page = owner.client.get(f"/runs/{run_id}", headers={"Accept": "text/html"})
    assert page.status_code == 200
    assert len(page_statements) <= 12 and len(page.content) <= 100_000

    with counted(app.state.context.engine) as statements:
        reply = owner.client.get(f"/api/v1/runs/{run_id}/curves")
    found = reply.json()
    assert (found["total"], found["bucket_steps"]) == (STEPS, 512)
    assert list(found["curves"]) == list(Metric)
    for curve in found["curves"].values():
        values = sum(len(curve[name]) for name in ("first", "last", "minimum", "maximum", "mean"))
        assert 0 < values <= POINTS_LIMIT
        assert set(curve["missing"]) == {0}
    loss = found["curves"]["loss"]
    assert sum(loss["gaps"]) == STEPS // 5003
    assert (min(loss["minimum"]), max(loss["maximum"])) == (1.0, 1.999)
    # Whose cookie, the run, its range, its last event (2), all curves, and the values at their buckets' ends.
    assert len(statements) <= 7
    # Ten curves of 400 buckets, nine lists of up to 20 characters.
    assert len(reply.content) <= 10 * CURVE_BUCKETS * 9 * 20

    with counted(app.state.context.engine) as statements:
        reply = owner.client.get(f"/api/v1/runs/{run_id}/metrics")
    points = reply.json()["data"]
    assert len(points) <= POINTS_LIMIT and len(statements) <= 8
    assert len(reply.content) <= POINTS_LIMIT * 300
    assert sum(point["loss"] is None for point in points) == STEPS // 5003, "every gap is in a stretch of its own, and is seen"

    near = owner.client.get(f"/api/v1/runs/{run_id}/curves", params={"metric": "loss", "after_step": 5000, "to_step": 5400}).json()
    assert (near["total"], near["bucket_steps"], list(near["curves"])) == (400, 1, ["loss"])
    assert near["curves"]["loss"]["first_step"] == list(range(5001, 5401))
    assert near["curves"]["loss"]["mean"][2] is None and near["curves"]["loss"]["gaps"][2] == 1
    whole = owner.client.get(f"/api/v1/runs/{run_id}/metrics", params={"after_step": 5000, "to_step": 7000}).json()
    assert [point["step"] for point in whole["data"]] == list(range(5001, 7001)) and not whole["down_sampled"]


@pytest.mark.database
def test_missing_steps_are_told_and_a_live_run_sends_only_what_is_new(engine: Engine, owner: Person, run_id: str):
    record(engine, run_id, [step_event(step, 1, step, 1.0) for step in range(1, 1001) if not 300 < step <= 305])
    curve = owner.client.get(f"/api/v1/runs/{run_id}/curves", params={"metric": "loss"}).json()["curves"]["loss"]
    # Buckets of three: 301 and 302 are missing beside 300; a bucket without any step is not there, and its neighbours show it.
    assert {step: missing for step, missing in zip(curve["first_step"], curve["missing"], strict=True) if missing} == {300: 2}
    assert 303 not in curve["first_step"] and 306 in curve["first_step"]
    record(engine, run_id, [step_event(1001, 1, 1001, 2.0)])
    news = owner.client.get(f"/api/v1/runs/{run_id}/metrics", params={"after_step": 1000}).json()
    assert [point["step"] for point in news["data"]] == [1001]


@pytest.mark.database
def test_a_run_without_steps_and_a_strangers_run(engine: Engine, owner: Person, run_id: str, mate: Person):
    reply = owner.client.get(f"/api/v1/runs/{run_id}/curves").json()
    assert (reply["total"], reply["last_event_id"]) == (0, None)
    assert all(curve["first_step"] == [] for curve in reply["curves"].values())
    assert mate.client.get(f"/api/v1/runs/{run_id}/curves").status_code == 404
    assert owner.client.get(f"/api/v1/runs/{run_id}/curves", params={"metric": "secret"}).status_code == 422
