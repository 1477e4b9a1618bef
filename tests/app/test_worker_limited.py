"""Limited children: foreign files are read under limits, and each limit names itself."""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from fixtures.tiny_model import make_tiny_model

from lohan.errors import CapacityError, DataError, DriveSpaceError, EngineError, LohanError, StorageError
from lohan.units import MIB
from lohan_app.settings import Settings
from lohan_app.worker import confined
from lohan_app.worker.limited import AddressSpace, LimitError, _outcome, _typed_error, run_limited, sweep_scratch

ROW_CHECK = "lohan_app.datasets.row_check"
MODEL_CHECK = "lohan_app.base_models.model_check"
# Counting its lines never ends, so that a limit is met on a machine of any speed.
ENDLESS = "/dev/zero"
ROW = json.dumps({"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}]}) + "\n"


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """Rows whose check takes several seconds of CPU time."""
    path = tmp_path / "large.jsonl"
    with path.open("w") as file:
        for _ in range(10):
            file.write(ROW * 10_000)
    return path


def limited(settings: Settings, **changes: int) -> Settings:
    return settings.model_copy(update=changes)


def scratch_folders(settings: Settings) -> list[Path]:
    return list((settings.data_dir / "cache" / "limited").iterdir())


def test_the_result_comes_back_and_nothing_is_left(settings: Settings, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(ROW * 3)
    found = run_limited(ROW_CHECK, [str(path)], settings)
    assert (found["row_count"], found["bad_row_count"]) == (3, 0)
    assert scratch_folders(settings) == []


def test_a_typed_error_comes_back_as_its_type(settings: Settings, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.touch()
    with pytest.raises(DataError) as caught:
        run_limited(ROW_CHECK, [str(path)], settings)
    assert (caught.value.message, caught.value.place) == ("the file has no rows", "rows.jsonl")
    assert caught.value.remedy


def test_memory_names_itself(settings: Settings, tmp_path: Path) -> None:
    """Looking into a model loads torch, whose libraries alone are larger than the least that can be set."""
    model = make_tiny_model(tmp_path / "tiny")
    small = limited(settings, worker_memory_bytes=256 * MIB)
    with pytest.raises(LimitError) as caught:
        run_limited(MODEL_CHECK, [str(model), str(tmp_path / "out")], small, address_space=AddressSpace.LIMITED)
    assert "256.00 MiB of memory" in caught.value.message
    assert "LOHAN_WORKER_MEMORY_BYTES" in (caught.value.remedy or "")


def test_torch_fits_into_the_default_memory_where_mapped_files_do_not_count(settings: Settings, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "tiny")
    (tmp_path / "out").mkdir()
    found = run_limited(MODEL_CHECK, [str(model), str(tmp_path / "out")], settings, address_space=AddressSpace.MAPS_FILES)
    assert found["architecture"] == "llama"


def test_cpu_time_names_itself(settings: Settings) -> None:
    with pytest.raises(LimitError) as caught:
        run_limited(ROW_CHECK, [ENDLESS], limited(settings, worker_cpu_seconds=1), timeout_seconds=120)
    assert "1 s of CPU time" in caught.value.message
    assert "LOHAN_WORKER_CPU_SECONDS" in (caught.value.remedy or "")


def test_wall_clock_time_names_itself_and_the_child_is_gone(settings: Settings, new_children: Callable[[], list[psutil.Process]]) -> None:
    with pytest.raises(LimitError) as caught:
        run_limited(ROW_CHECK, [ENDLESS], settings, timeout_seconds=1.0)
    assert "longer than 1 s" in caught.value.message
    assert new_children() == []
    assert scratch_folders(settings) == []


def test_the_child_tells_how_far_it_is_and_sees_no_secret(
    settings: Settings, large: Path, monkeypatch: pytest.MonkeyPatch, new_children: Callable[[], list[psutil.Process]]
) -> None:
    monkeypatch.setenv("LOHAN_DATABASE_URL", "postgresql://user:secret@host/name")
    told: list[float] = []
    environments: list[dict[str, str]] = []
    limits: list[tuple[int, int]] = []

    def on_progress(fraction: float) -> None:
        told.append(fraction)
        for child in new_children():
            with suppress(psutil.NoSuchProcess):  # it may have ended behind its last word
                session = os.getsid(child.pid)
                environments.append(child.environ())
                limits.extend(child.rlimit(kind) for kind in (psutil.RLIMIT_AS, psutil.RLIMIT_CORE))
                assert session == child.pid

    run_limited(ROW_CHECK, [str(large)], settings, on_progress=on_progress)
    assert told == sorted(told)
    assert 0 < told[0] <= told[-1] <= 1
    assert "secret" not in str(environments)
    assert "PATH" in environments[0]
    assert limits[:2] == [(settings.worker_memory_bytes,) * 2, (0, 0)]


def test_a_module_that_cannot_run_is_quoted(settings: Settings) -> None:
    with pytest.raises(EngineError, match=r"No module named 'lohan_app\.nothing'"):
        run_limited("lohan_app.nothing", [], settings)


def test_every_error_of_the_engine_survives_the_way_back() -> None:
    for kind in (CapacityError, DriveSpaceError):
        error = kind("too little", need_bytes=5, have_bytes=3, place="here", remedy="Buy more.")
        again = _typed_error(error.to_dict(), {"need_bytes": 5, "have_bytes": 3})
        assert type(again) is kind
        assert (again.need_bytes, again.have_bytes, again.to_dict()) == (5, 3, error.to_dict())
    strange = _typed_error({"kind": "annotations", "message": "odd", "place": None, "remedy": None}, {})
    assert type(strange) is EngineError
    assert isinstance(strange, LohanError)


FULL_DRIVE_ERRORS = {
    "of the system": OSError(errno.ENOSPC, "No space left on device"),
    "of a quota": OSError(errno.EDQUOT, "Disk quota exceeded"),
    "of the engine": StorageError("the file cannot be written", errno=errno.ENOSPC),
    "of a library": RuntimeError("I/O error: No space left on device (os error 28)"),
}


@pytest.mark.parametrize("error", FULL_DRIVE_ERRORS.values(), ids=FULL_DRIVE_ERRORS)
def test_a_full_drive_is_told_by_the_exit_code_alone(
    error: Exception, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Result and last words may lie on the drive that is full. It is no typed error: those say that what was read cannot be used."""
    result, output = tmp_path / "result.json", tmp_path / "output.log"

    def fail(_arguments: list[str]) -> None:
        raise error

    monkeypatch.setitem(sys.modules, "full_drive", SimpleNamespace(main=fail))
    status = confined.main([str(result), "full_drive"])
    assert not result.exists()
    with pytest.raises(OSError, match="No space left") as caught:
        _outcome(status, result, output, settings, 1.0)
    assert caught.value.errno == errno.ENOSPC
    assert not isinstance(caught.value, LohanError)


def test_what_killed_workers_left_is_swept_and_what_may_be_in_use_is_not(settings: Settings) -> None:
    root = settings.data_dir / "cache" / "limited"
    for name, hours in (("old", 3.0), ("young", 0.5)):
        (root / name).mkdir(parents=True)
        (root / name / "result.json").touch()
        long_ago = time.time() - 3600 * hours
        os.utime(root / name, (long_ago, long_ago))
    sweep_scratch(settings)
    assert [folder.name for folder in scratch_folders(settings)] == ["young"]
