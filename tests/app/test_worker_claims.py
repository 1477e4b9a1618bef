"""The queue's rules: order, who may pass whom under a simulated clock, and claims that race in real transactions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Barrier

import pytest
from fixtures.runs import make_run, read_run
from fixtures.simulated_machine import simulated_machine
from sqlalchemy import Engine, select

from lohan.units import GIB
from lohan_app.db import read_transaction, write_transaction
from lohan_app.entities import DeviceUse, PauseCause, Run, RunState
from lohan_app.entities.base import now
from lohan_app.runs import queries, repository
from lohan_app.runs.kinds import NO_DEVICE
from lohan_app.runs.line import WINDOW, Use, device_seconds, in_order, places
from lohan_app.runs.states import ACTIVE_STATES, Trigger
from lohan_app.settings import Settings
from lohan_app.worker.claims import PASSING_LIMIT, Line, claim
from lohan_app.worker.reservations import DirectoryRoom, GpuRoom, Held, Machine, Need, Reservation

START = datetime(2026, 12, 1, tzinfo=UTC)
MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
MACHINE = Machine(("cpu:0", "cpu:1"), 65 * GIB, 65 * GIB, (DirectoryRoom("/a", "drive", 100 * GIB),), 100 * GIB)
"""With 64 GiB of memory for runs."""


# ---------------------------------------------------------------- order
def queued(name: str, owner: str, *, priority: int = 0, since: datetime = START) -> Run:
    return Run(id=name, name=name, owner_id=owner, priority=priority, queued_at=since, created_at=START)


def test_priority_then_the_owners_time_on_devices_then_age() -> None:
    seconds = {"ann": 90_000.0, "ben": 60.0}
    line = [
        queued("a1", "ann", since=START),
        queued("a2", "ann", since=START + HOUR),
        queued("b1", "ben", since=START + 2 * HOUR),
        queued("c1", "cem", since=START + 3 * HOUR),
        queued("b2", "ben", since=START + 3 * HOUR, priority=5),
        queued("a3", "ann", since=START, priority=-1),
    ]
    ordered = in_order(line, seconds)
    assert [run.id for run in ordered] == ["b2", "c1", "b1", "a1", "a2", "a3"]
    assert in_order(line[::-1], seconds) == ordered
    found = places(ordered, seconds)
    assert (found["b2"].position, found["b2"].of, found["b2"].why) == (1, 6, "Nobody is before it.")
    assert found["a2"].why == (
        "Before it: 1 with a higher priority, 2 of owners who had less time on devices in the last 7 days than its own (25 h 00 min),"
        " 1 of the same owner, longer in line."
    )


def test_age_decides_among_owners_with_the_same_time() -> None:
    ordered = in_order([queued("late", "ann", since=START + HOUR), queued("early", "ben")], {})
    assert places(ordered, {})["late"].why == "Before it: 1 that came into line earlier."


def test_device_seconds_count_the_window_alone_and_every_device() -> None:
    at = START + 30 * DAY
    uses = [
        Use("ann", 1, at - 3 * HOUR, at - 2 * HOUR),
        Use("ann", 2, at - 30 * MINUTE, None),  # at work
        Use("ben", 1, at - WINDOW - 5 * HOUR, at - WINDOW + HOUR),  # reaches into the window
        Use("cem", 1, at - WINDOW - 5 * HOUR, at - WINDOW - HOUR),
        Use("dan", 1, at - HOUR, at - 2 * HOUR),  # a clock was set back
    ]
    assert device_seconds(uses, at) == {"ann": 7200.0, "ben": 3600.0, "cem": 0.0, "dan": 0.0}


@pytest.mark.database
def test_time_on_devices_is_noted_with_the_runs_transitions(settings: Settings, engine: Engine) -> None:
    run_id = make_run(settings, engine)
    for trigger in (Trigger.CLAIM, Trigger.RELEASE, Trigger.CLAIM, Trigger.TRAINER_STARTED, Trigger.REQUEST_PAUSE):
        with write_transaction(engine) as session:
            repository.fire(session, run_id, trigger, **({"devices": ["cpu:0", "cpu:1"]} if trigger is Trigger.CLAIM else {}))
    with read_transaction(engine) as session:
        first, second = sorted(queries.device_uses(session, now() - DAY), key=lambda use: use.began_at)
    assert (first.devices, first.ended_at is None, second.devices, second.ended_at) == (2, False, 2, None)
    with write_transaction(engine) as session:
        repository.fire(session, run_id, Trigger.FAIL)
        repository.mark_deleted(session, run_id, now())
    with read_transaction(engine) as session:
        uses = queries.device_uses(session, now() - DAY)
        assert len(uses) == 2, "of a deleted run too"
        assert all(use.ended_at is not None and use.ended_at >= use.began_at for use in uses)
        assert queries.device_uses(session, now() + DAY) == []


@pytest.mark.database
@pytest.mark.parametrize(("cause", "keeps_place"), [(PauseCause.REQUEST, False), (PauseCause.DISK_FULL, True)])
def test_who_leaves_the_line_goes_to_its_end(settings: Settings, engine: Engine, cause: PauseCause, keeps_place: bool) -> None:
    run_id = make_run(settings, engine, state=RunState.PAUSED, pause_cause=cause, queued_at=START)
    with write_transaction(engine) as session:
        repository.fire(session, run_id, Trigger.RESUME)
    assert (read_run(engine, run_id).queued_at == START) is keeps_place


# ---------------------------------------------------------------- passing
@dataclass
class Waiting:
    name: str
    need: Need
    since: datetime
    work: timedelta


class Simulation:
    """A queue under a clock of its own: every ten minutes a walk through it, as the reconciler does it."""

    def __init__(self, machine: Machine = MACHINE) -> None:
        self.machine, self.at, self.active, self.waiting = machine, START, dict[str, tuple[Held, datetime]](), list[Waiting]()
        self.started_at: dict[str, datetime] = {}
        self.reasons: dict[str, str] = {}

    def submit(self, name: str, ram_gib: int, *, hours: float = 1, device: str = "auto", **space: int) -> None:
        need = Need(device, ram_gib * GIB, {f"/{path}": size * GIB for path, size in space.items()})
        self.waiting.append(Waiting(name, need, self.at, hours * HOUR))

    def run(self, duration: timedelta, each: Callable[[], None] = lambda: None) -> None:
        end = self.at + duration
        while self.at < end:
            each()
            self.active = {name: (held, until) for name, (held, until) in self.active.items() if until > self.at}
            self._walk()
            self.at += 10 * MINUTE

    def _walk(self) -> None:
        # In this simulation nobody settles: what is free is what is not promised.
        line = Line(self.machine, [held for held, _ in self.active.values()], self.at)
        for run in list(self.waiting):
            answer = line.ask(run.name, run.need, run.since)
            if isinstance(answer, str):
                self.reasons[run.name] = answer
                continue
            held = Held(run.name, answer.devices, answer.ram_bytes, answer.space, is_settled=False)
            line.started(held)
            self.active[run.name] = (held, self.at + run.work)
            self.started_at[run.name] = self.at
            self.waiting.remove(run)
        devices = [device for held, _ in self.active.values() for device in held.devices]
        assert len(devices) == len(set(devices))
        assert sum(held.ram_bytes for held, _ in self.active.values()) <= 64 * GIB


def test_a_large_run_is_passed_for_a_while_and_is_not_starved() -> None:
    """Small runs come all the time. Without the limit the large one, which needs the memory of both devices, would never begin."""
    simulation = Simulation()
    simulation.submit("small 0", 30, hours=1)
    simulation.run(10 * MINUTE)
    simulation.submit("large", 60)
    number = iter(range(1, 1000))
    simulation.run(DAY, each=lambda: simulation.submit(f"small {next(number)}", 30, hours=1) if len(simulation.waiting) < 3 else None)
    assert "small 1" in simulation.started_at, "it is passed at first"
    asked = START + 10 * MINUTE
    assert simulation.started_at["small 1"] < asked + PASSING_LIMIT
    # Those that began before the limit end an hour later at most.
    assert simulation.started_at["large"] <= asked + PASSING_LIMIT + HOUR + 10 * MINUTE
    assert not any(asked + PASSING_LIMIT < at < simulation.started_at["large"] for at in simulation.started_at.values())
    assert len(simulation.started_at) > 20, "and the queue goes on after it"


def test_who_is_kept_waiting_is_told_for_whom() -> None:
    simulation = Simulation()
    simulation.submit("long", 30, hours=9)
    simulation.run(10 * MINUTE)
    simulation.submit("large", 60)
    simulation.run(PASSING_LIMIT + 10 * MINUTE)
    assert "After 30 minutes in line nobody passes it any more" in simulation.reasons["large"]
    simulation.submit("small", 30)
    simulation.submit("tiny", 1, device="cpu:1")
    simulation.run(HOUR)
    assert simulation.reasons["small"] == "Lets 'large' go first, for which what it needs is kept free after 30 minutes in line."
    assert "small" not in simulation.started_at
    assert "tiny" not in simulation.started_at, "it would take the device"


def test_what_fits_beside_a_waiting_run_passes_at_any_time() -> None:
    simulation = Simulation()
    simulation.submit("long", 30, hours=9, device="cpu:0")
    simulation.run(10 * MINUTE)
    simulation.submit("second", 30, device="cpu:0")
    simulation.run(2 * HOUR)
    simulation.submit("beside", 4, device="cpu:1")
    simulation.submit("too much", 5, device="cpu:1")
    simulation.run(HOUR)
    assert "beside" in simulation.started_at
    assert simulation.started_at["beside"] > START + PASSING_LIMIT
    assert "too much" not in simulation.started_at


@pytest.mark.parametrize("kind", ["more than the machine has", "a stranger's GPU"])
def test_a_run_that_no_end_of_ours_helps_keeps_nobody_waiting(kind: str) -> None:
    gpu = GpuRoom(24 * GIB, 20 * GIB, held_by=("process 1",))
    simulation = Simulation(replace(MACHINE, devices=("cpu:0", "GPU-a"), gpus={"GPU-a": gpu}))
    if kind == "more than the machine has":
        simulation.submit("waits", 70)
    else:
        simulation.submit("waits", 60, device="cuda")
    simulation.run(2 * HOUR)
    simulation.submit("small", 30)
    simulation.run(10 * MINUTE)
    assert "small" in simulation.started_at
    assert "waits" not in simulation.started_at


def test_space_is_kept_free_in_each_directory() -> None:
    simulation = Simulation()
    simulation.submit("long", 1, hours=9, a=50)
    simulation.run(10 * MINUTE)
    simulation.submit("large", 1, a=90)
    simulation.run(2 * HOUR)
    simulation.submit("small", 1, a=10)
    simulation.run(10 * MINUTE)
    assert "small" not in simulation.started_at
    simulation.run(10 * HOUR)
    assert simulation.started_at["large"] <= simulation.started_at["small"]


def test_a_run_that_asks_for_no_device_is_kept_memory_alone() -> None:
    line = Line(MACHINE, [Held("training", ["cpu:0", "cpu:1"], 60 * GIB, {}, is_settled=False)], START)
    assert line.ask("small", Need(NO_DEVICE, 4 * GIB), START) == Reservation([], 4 * GIB)
    assert "host memory" in str(line.ask("export", Need(NO_DEVICE, 5 * GIB), START - PASSING_LIMIT))
    assert line.kept == [Held("export", [], 5 * GIB, {}, is_settled=False)]


# ---------------------------------------------------------------- claims that race
@pytest.fixture
def settings(settings: Settings) -> Settings:
    """With two drives for states."""
    return settings.model_copy(update={"state_dirs": (settings.data_dir / "drive-0", settings.data_dir / "drive-1")})


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def needs(case: str, folders: tuple[Path, ...]) -> Need:
    """Of which the machine has room for one."""
    first, second = (str(folder) for folder in folders)
    return {
        "device": Need("cpu:0", GIB),
        "host memory": Need("auto", 40 * GIB),
        "first directory": Need("auto", GIB, {first: 30 * GIB, second: GIB}),
        "second directory": Need("auto", GIB, {first: GIB, second: 30 * GIB}),
    }[case]


@pytest.mark.database
@pytest.mark.parametrize("case", ["device", "host memory", "first directory", "second directory"])
def test_two_runs_that_do_not_fit_together_never_run_together(
    settings: Settings, engine: Engine, pool: ThreadPoolExecutor, case: str
) -> None:
    """Two claimers who have both seen an empty machine, in transactions of their own at the same time."""
    machine, folders = simulated_machine(settings, ssd_free_bytes=100 * GIB), settings.state_folders
    need = needs(case, folders)
    for _ in range(4):
        runs = [make_run(settings, engine) for _ in range(2)]
        barrier = Barrier(2)

        def claim_one(run_id: str, barrier: Barrier = barrier) -> Reservation | str | None:
            barrier.wait()
            return claim(engine, run_id, need, machine)

        answers = list(pool.map(claim_one, runs))
        won, lost = sorted(answers, key=lambda answer: isinstance(answer, str))
        assert isinstance(won, Reservation)
        assert isinstance(lost, str)
        with read_transaction(engine) as session:
            active = repository.runs_in(session, ACTIVE_STATES)
            assert len(session.scalars(select(DeviceUse).where(DeviceUse.ended_at.is_(None))).all()) == 1
        assert [run.id for run in active] == [runs[answers.index(won)]]
        with write_transaction(engine) as session:
            repository.fire(session, active[0].id, Trigger.FAIL)
            repository.fire(session, runs[answers.index(lost)], Trigger.REQUEST_CANCEL)
        assert read_run(engine, active[0].id).reserved_directories is None


@pytest.mark.database
def test_one_run_is_claimed_once(settings: Settings, engine: Engine, pool: ThreadPoolExecutor) -> None:
    machine, run_id, barrier = simulated_machine(settings), make_run(settings, engine), Barrier(2)

    def claim_it(_: int) -> Reservation | str | None:
        barrier.wait()
        return claim(engine, run_id, Need("auto", GIB), machine)

    answers = list(pool.map(claim_it, range(2)))
    assert sorted(answers, key=lambda answer: answer is None) == [Reservation(["cpu:0"], GIB), None]
