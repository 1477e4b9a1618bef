"""kill -9 of every part of a working appliance while a run trains: the run goes on or resumes, and two trainers never meet."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fixtures.appliance import Appliance, TrainerCount, free_port
from fixtures.processes import is_alive, no_process_left
from fixtures.runs import kill_wanted, read_run, want
from fixtures.waiting import wait_until

from lohan_app.entities import RunState, Wanted
from lohan_app.settings import Settings
from lohan_app.worker.broker import answers


@pytest.fixture(scope="module")
def appliance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Appliance]:
    """One appliance for the module, as a long-lived one has it: SQLite, its own broker, two devices."""
    folder = tmp_path_factory.mktemp("appliance")
    (folder / "models").mkdir()
    settings = Settings(data_dir=folder / "data", model_dirs=(folder / "models",), devices=("cpu:0", "cpu:1"), port=free_port())
    with no_process_left(folder):
        appliance = Appliance(settings)
        try:
            appliance.start()
            yield appliance
        finally:
            appliance.close()


def test_killed_web_server(appliance: Appliance) -> None:
    run_id = appliance.submit_held()
    with TrainerCount(appliance, run_id) as count:
        killed = appliance.web()
        killed.kill()
        wait_until(lambda: not is_alive(killed), what="its end")
        wait_until(appliance.is_ready, what="the web server's restart")
        appliance.release(run_id)
        appliance.wait_for_end(run_id)
    appliance.check_whole_curve(run_id, attempt=1)
    assert count.most == 1


@pytest.mark.parametrize("queue", ["launch", "io"])
def test_killed_celery_worker(appliance: Appliance, queue: str) -> None:
    run_id = appliance.submit_held()
    with TrainerCount(appliance, run_id) as count:
        killed = appliance.celery(queue)
        killed.kill()
        wait_until(lambda: not is_alive(killed) and appliance.pool_children(queue), what="the Celery worker's restart")
        appliance.release(run_id)
        appliance.wait_for_end(run_id)
    appliance.check_whole_curve(run_id, attempt=1)
    assert count.most == 1


def test_killed_pool_child(appliance: Appliance) -> None:
    run_id = appliance.submit_held()
    with TrainerCount(appliance, run_id) as count:
        killed = appliance.pool_children()
        for child in killed:
            child.kill()
        wait_until(lambda: set(appliance.pool_children()) - set(killed), what="another pool child")
        appliance.release(run_id)
        appliance.wait_for_end(run_id)
    appliance.check_whole_curve(run_id, attempt=1)
    assert count.most == 1


def test_killed_worker_with_its_reconciler(appliance: Appliance) -> None:
    run_id = appliance.submit_held()
    with TrainerCount(appliance, run_id) as count:
        killed = appliance.worker()
        killed.kill()
        wait_until(lambda: not is_alive(killed), what="its end")
        appliance.release(run_id)
        appliance.wait_for_end(run_id)
    appliance.check_whole_curve(run_id, attempt=1)
    assert count.most == 1
    wait_until(appliance.is_staffed, what="the worker's restart")


def test_killed_supervisor(appliance: Appliance) -> None:
    run_id = appliance.submit_held()
    with TrainerCount(appliance, run_id) as count:
        appliance.supervisor(run_id).kill()
        wait_until(lambda: read_run(appliance.engine, run_id).epoch == 2, what="the next supervisor")
        assert read_run(appliance.engine, run_id).state is RunState.RUNNING
        appliance.release(run_id)
        appliance.wait_for_end(run_id)
    appliance.check_whole_curve(run_id, attempt=1)
    assert count.most == 1


def test_killed_broker(appliance: Appliance) -> None:
    run_id = appliance.submit_held()
    with TrainerCount(appliance, run_id) as count:
        killed = appliance.broker()
        killed.kill()
        wait_until(lambda: not is_alive(killed), what="its end")
        after = appliance.submit()
        appliance.release(run_id)
        appliance.wait_for_end(run_id)
        appliance.wait_for_end(after)
    appliance.check_whole_curve(run_id, attempt=1)
    appliance.check_whole_curve(after, attempt=1)
    assert count.most == 1
    wait_until(lambda: answers(appliance.settings), what="the broker's restart")


def test_killed_trainer(appliance: Appliance) -> None:
    run_id = appliance.submit_held()
    with TrainerCount(appliance, run_id) as count:
        appliance.release(run_id)
        appliance.trainers(run_id)[0].kill()
        run = appliance.wait_for_end(run_id)
    appliance.check_whole_curve(run_id, attempt=run.attempt)
    assert count.most == 1
    assert run.state_reason == ""


def test_killed_supervisor_and_trainer(appliance: Appliance) -> None:
    run_id = appliance.submit_held()
    with TrainerCount(appliance, run_id) as count:
        appliance.supervisor(run_id).kill()
        appliance.trainers(run_id)[0].kill()
        wait_until(lambda: read_run(appliance.engine, run_id).attempt == 2, what="the second attempt")
        assert "attempt 1 of 3" in read_run(appliance.engine, run_id).state_reason
        appliance.release(run_id)
        appliance.wait_for_end(run_id)
    appliance.check_whole_curve(run_id, attempt=2)
    assert count.most == 1


def test_one_device_one_run_and_the_queue_says_why(appliance: Appliance) -> None:
    first = appliance.submit_held(name="first", device="cpu:1")
    second = appliance.submit(name="second", device="cpu:1")
    wait_until(lambda: read_run(appliance.engine, second).state_reason, what="a reason to wait")
    assert read_run(appliance.engine, second).state_reason == "Waits for cpu:1, in use by 'first'."
    appliance.release(first)
    first_run, second_run = appliance.wait_for_end(first), appliance.wait_for_end(second)
    assert first_run.finished_at is not None
    assert second_run.started_at is not None
    assert second_run.started_at >= first_run.finished_at


def test_cancel_reaches_queued_and_running_runs(appliance: Appliance) -> None:
    running = appliance.submit_held()
    unprepared = appliance.submit(prepared_at=None)
    for run_id in (running, unprepared):
        want(appliance.engine, run_id, Wanted.CANCEL)
    for run_id in (running, unprepared):
        appliance.wait_for_end(run_id, RunState.CANCELLED)


def test_a_pause_outlives_everything_and_the_run_goes_on_from_there(appliance: Appliance) -> None:
    run_id = appliance.submit_held()
    with TrainerCount(appliance, run_id) as count:
        appliance.supervisor(run_id).kill()
        want(appliance.engine, run_id, Wanted.PAUSE)
        killed = appliance.worker()
        killed.kill()
        wait_until(lambda: read_run(appliance.engine, run_id).state is RunState.PAUSED, timeout_seconds=90, what="the pause")
        assert appliance.trainers(run_id) == []
        appliance.release(run_id)
        want(appliance.engine, run_id, Wanted.RUN)  # which is all that a request to resume needs to leave behind
        appliance.wait_for_end(run_id)
    appliance.check_whole_curve(run_id, attempt=2)
    assert count.most == 1
    wait_until(appliance.is_staffed, what="the worker's restart")


def test_a_trainer_that_hears_nothing_is_killed_by_request_and_the_queue_goes_on(appliance: Appliance) -> None:
    deaf = appliance.submit(steps=100_000, script={"ignore_signals": True}, device="cpu:1", name="deaf")
    wait_until(lambda: read_run(appliance.engine, deaf).step >= 1, timeout_seconds=90, what="its first step")
    after = appliance.submit(device="cpu:1")
    want(appliance.engine, deaf, Wanted.CANCEL)
    wait_until(lambda: read_run(appliance.engine, deaf).state is RunState.CANCELLING, what="the request to be passed on")
    kill_wanted(appliance.engine, deaf)
    appliance.wait_for_end(deaf, RunState.CANCELLED)
    assert appliance.trainers(deaf) == []
    appliance.wait_for_end(after)


def test_a_failed_run_is_followed_by_the_next(appliance: Appliance) -> None:
    failing = appliance.submit(script={"fail_at_step": 2}, device="cpu:1", name="failing")
    after = appliance.submit(device="cpu:1")
    appliance.wait_for_end(failing, RunState.FAILED)
    appliance.wait_for_end(after)


def test_killed_lohan_up_takes_its_children_along_and_leaves_the_run(appliance: Appliance) -> None:
    """The last test on this appliance. The run needs none of what is gone: its supervisor brings it to its end."""
    run_id = appliance.submit_held()
    children = appliance.up.children(recursive=True)
    appliance.kill_up()
    wait_until(lambda: not any(is_alive(child) for child in children), what="the children's end")
    assert len(appliance.trainers(run_id)) == 1
    assert is_alive(appliance.supervisor(run_id))
    appliance.release(run_id)
    appliance.wait_for_end(run_id)
    appliance.check_whole_curve(run_id, attempt=1)


@pytest.mark.database(only="postgres")
@pytest.mark.broker
def test_on_postgresql_and_redis_and_a_clean_stop(tmp_path_factory: pytest.TempPathFactory, postgres_url: str, broker_url: str) -> None:
    folder = tmp_path_factory.mktemp("servers")
    (folder / "models").mkdir()
    settings = Settings(
        data_dir=folder / "data", model_dirs=(folder / "models",), devices=("cpu:0",), port=free_port(),
        database_url=postgres_url, broker_url=broker_url,
    )  # fmt: skip
    appliance = Appliance(settings)
    with no_process_left(folder):
        try:
            appliance.start()
            run_id = appliance.submit_held()
            with TrainerCount(appliance, run_id) as count:
                appliance.supervisor(run_id).kill()
                appliance.worker().kill()
                wait_until(lambda: read_run(appliance.engine, run_id).epoch == 2, what="the next supervisor")
                children = appliance.up.children(recursive=True)
                assert appliance.stop() == 0
                # A pool child of Celery dies by the kernel's signal just after its parent, so this is waited for.
                wait_until(lambda: not any(is_alive(child) for child in children), what="the children's end")
                assert "Runs that are training go on" in appliance.log.read_text()
                assert len(appliance.trainers(run_id)) == 1
                appliance.release(run_id)
                appliance.wait_for_end(run_id)
            appliance.check_whole_curve(run_id, attempt=1)
            assert count.most == 1
        finally:
            appliance.close()
