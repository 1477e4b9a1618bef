"""`lohan doctor` about the native core: every service of the kernel that is refused is named, with its remedy, and nothing is missing."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from fixtures.appliance import environment_of, free_port

from lohan import _native
from lohan.hardware.probe import probe
from lohan_app.settings import Settings
from lohan_app.worker import native_findings
from lohan_app.worker.doctor import examine
from lohan_app.worker.findings import Finding, Status
from lohan_app.worker.native_findings import direct_refusal, huge_pages, kernel_services, native_core, state_drive

IN_MEMORY = Path("/dev/shm")  # noqa: S108 - a tmpfs on every Linux, and what is made there is removed


def findings_in_a_child(preparation: str) -> dict[str, dict[str, str]]:
    """What `kernel_services` finds in a process of its own after `preparation`, by subject."""
    body = f"""
    import ctypes, dataclasses, errno, json, os, resource
    from lohan_app.worker.native_findings import kernel_services
    {preparation}
    print(json.dumps([dataclasses.asdict(finding) for finding in kernel_services()]))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(body)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return {finding["subject"]: finding for finding in json.loads(done.stdout)}


def by_subject(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.subject: finding for finding in findings}


# ---------------------------------------------------------------- io_uring
def test_io_uring_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "io_uring_refusal", lambda: "")
    found = by_subject(kernel_services())["io_uring"]
    assert (found.status, found.remedy) == (Status.OK, None)


def test_io_uring_that_is_refused_is_named_with_its_reason() -> None:
    """By a seccomp filter, as Docker's default profile refuses it."""
    prepare = "from tests.native.children import forbid_io_uring; forbid_io_uring(errno.EPERM)"
    found = findings_in_a_child(prepare)["io_uring"]
    assert found["status"] == "note"
    assert found["text"].startswith("cannot be used: io_uring_setup: ")
    assert os.strerror(errno.EPERM) in found["text"]
    assert "threads read and write the state files instead" in found["text"]
    assert "seccomp" in found["remedy"]
    assert "kernel.io_uring_disabled" in found["remedy"]


# ---------------------------------------------------------------- huge pages
@pytest.mark.parametrize(
    ("setting", "status", "text"),
    [
        ("always [madvise] never", Status.OK, "are on (madvise)"),
        ("[always] madvise never", Status.OK, "are on (always)"),
        ("always madvise [never]", Status.NOTE, "transparent huge pages are off"),
        (None, Status.NOTE, "this kernel has no transparent huge pages"),
    ],
)
def test_huge_pages_by_the_systems_setting(tmp_path: Path, setting: str | None, status: Status, text: str) -> None:
    file = tmp_path / "enabled"
    if setting is not None:
        file.write_text(setting + "\n")
    found = huge_pages(file)
    assert (found.subject, found.status) == ("huge pages", status)
    assert text in found.text
    assert (found.remedy is None) == (status is Status.OK)


def test_huge_pages_that_are_off_for_this_process() -> None:
    """PR_SET_THP_DISABLE (41), as some container runtimes and profilers set it."""
    found = findings_in_a_child("assert ctypes.CDLL(None).prctl(41, 1, 0, 0, 0) == 0")["huge pages"]
    assert found["status"] == "note"
    assert "are off" in found["text"]
    assert found["remedy"]


# ---------------------------------------------------------------- locked memory
def test_too_little_locked_memory_names_the_limit() -> None:
    """Without privileges: root, and who has CAP_IPC_LOCK, may exceed the limit."""
    drop = "os.setresuid(65534, 65534, 65534)" if os.getuid() == 0 else "pass"
    found = findings_in_a_child(f"resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536)); {drop}")["locked memory"]
    assert found["status"] == "note"
    assert "64.00 KiB may be locked (RLIMIT_MEMLOCK)" in found["text"]
    assert "1.12 GiB" in found["text"]
    assert "ulimit -l unlimited" in found["remedy"]


def test_looking_at_locked_memory_takes_none() -> None:
    """The trial locks address space, not memory: neither resident nor locked bytes stay, however often it runs."""
    fields = findings_in_a_child(
        """
    import json
    from lohan_app.worker import native_findings
    def field(name):
        line = next(line for line in open("/proc/self/status") if line.startswith(name + ":"))
        return int(line.split()[1])
    before = {name: field(name) for name in ("VmRSS", "VmLck")}
    for _ in range(20):
        native_findings.locked_memory(native_findings.STAGING_BYTES)
    after = {name: field(name) for name in before}
    assert after["VmLck"] == before["VmLck"], (before, after)
    assert after["VmRSS"] - before["VmRSS"] < 64 << 10, (before, after)  # kB; the trial is of 20 times 1.1 GiB
    """
    )
    assert "locked memory" in fields


# ---------------------------------------------------------------- direct I/O
def test_a_state_folder_in_memory_is_no_place_for_states() -> None:
    if not os.access(IN_MEMORY, os.W_OK):
        pytest.skip(f"{IN_MEMORY} cannot be written to")
    before = sorted(IN_MEMORY.iterdir())
    found = state_drive(probe([IN_MEMORY]).state_directories[0])
    assert found.status is Status.NOTE
    assert "states are refused there: it is on tmpfs" in found.text
    assert "Use ext4 or XFS" in (found.remedy or "")
    assert sorted(IN_MEMORY.iterdir()) == before


@pytest.mark.parametrize("filesystem", ["btrfs", "overlay"])
def test_a_state_folder_that_cannot_be_durable_is_said_to_be_so(tmp_path: Path, filesystem: str) -> None:
    found = state_drive(probe([tmp_path]).state_directories[0].model_copy(update={"filesystem": filesystem}))
    assert found.status is Status.NOTE
    assert f"states that can be resumed are refused there: it is on {filesystem}" in found.text


def test_a_state_folder_without_direct_io_is_named_with_the_cores_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(native_findings, "direct_refusal", lambda _path: "the file system does not take it")
    found = state_drive(probe([tmp_path]).state_directories[0].model_copy(update={"filesystem": "xfs"}))
    assert found.status is Status.NOTE
    assert "states go through the page cache: the file system does not take it" in found.text
    assert "Use ext4 or XFS" in (found.remedy or "")


def test_a_state_folder_that_takes_direct_io(tmp_path: Path) -> None:
    refusal = direct_refusal(tmp_path)
    if refusal:
        pytest.skip(f"the test's folder does not: {refusal}")
    assert refusal == ""
    found = state_drive(probe([tmp_path]).state_directories[0].model_copy(update={"filesystem": "ext4"}))
    assert found.status is Status.OK
    assert found.text.endswith("direct I/O")
    assert list(tmp_path.iterdir()) == []


def test_a_state_folder_that_is_not_there_is_not_judged_by_the_core(tmp_path: Path) -> None:
    assert direct_refusal(tmp_path / "none") is None


# ---------------------------------------------------------------- the core itself
def test_a_core_that_does_not_load_is_missing_and_its_services_are_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lohan._native", None)
    assert native_core().status is Status.MISSING
    assert kernel_services() == []


def test_doctor_lists_all_of_it_and_nothing_refused_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "io_uring_refusal", lambda: "refused for a test")
    settings = Settings(data_dir=tmp_path / "data", port=free_port(), state_dirs=(IN_MEMORY / f"lohan-doctor-{os.getpid()}",))
    try:
        found = by_subject(examine(settings))
    finally:
        settings.state_folders[0].rmdir()
    assert {"native core", "io_uring", "huge pages", "locked memory", "state drive"} <= set(found)
    assert all(found[subject].status is not Status.MISSING for subject in ("io_uring", "huge pages", "locked memory", "state drive"))
    assert found["io_uring"].status is found["state drive"].status is Status.NOTE


def test_the_command_prints_them(tmp_path: Path) -> None:
    environment = environment_of(Settings(data_dir=tmp_path / "data", port=free_port()))
    command = [sys.executable, "-m", "lohan_app.cli", "doctor"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout
    for subject in ("io_uring", "huge pages", "locked memory"):
        assert subject in done.stdout
