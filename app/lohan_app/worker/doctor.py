"""`lohan doctor`: what this machine has and what the product chose, in words; what is missing, with its remedy."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version

from sqlalchemy.exc import DBAPIError

import lohan
from lohan.errors import LohanError, StorageError
from lohan.hardware.probe import HardwareFacts, probe
from lohan.units import format_bytes
from lohan_app.db import check_connection, create_db_engine
from lohan_app.hardware.service import choices
from lohan_app.settings import Settings
from lohan_app.worker.broker import answers, find_broker_binary
from lohan_app.worker.findings import Finding, Status
from lohan_app.worker.native_findings import kernel_services, native_core, state_drive
from lohan_app.worker.processes import FileLock, is_held
from lohan_app.worker.up import listen

OLDEST_PYTHON = (3, 11)
EXIT_FINE, EXIT_MISSING = 0, 1


def run_doctor(settings: Settings, *, as_json: bool, say: Callable[[str], None] = print) -> int:
    """Print the findings; the exit code is 1 where something needed is missing."""
    findings = examine(settings)
    missing = [finding for finding in findings if finding.status is Status.MISSING]
    if as_json:
        say(json.dumps({"version": lohan.__version__, "ok": not missing, "findings": [asdict(finding) for finding in findings]}, indent=2))
        return EXIT_MISSING if missing else EXIT_FINE
    width = max(len(finding.subject) for finding in findings)
    for finding in findings:
        mark = {Status.OK: " ", Status.NOTE: "-", Status.MISSING: "!"}[finding.status]
        say(f"{mark} {finding.subject:<{width}}  {finding.text}")
        if finding.remedy is not None:
            say(f"  {'':<{width}}  -> {finding.remedy}")
    say("")
    say("Everything that is needed is here." if not missing else f"Missing: {', '.join(finding.subject for finding in missing)}.")
    return EXIT_MISSING if missing else EXIT_FINE


def examine(settings: Settings) -> list[Finding]:
    """Look at everything. Makes the data folder where it is missing; changes nothing else."""
    folders = list(_folders(settings))
    facts = probe(settings.state_folders)
    return [
        Finding("LoHan", Status.OK, f"{lohan.__version__}, data folder {settings.data_dir}"),
        *_software(),
        *_machine(settings, facts),
        *folders,
        *(state_drive(directory) for directory in facts.state_directories),
        *_models(settings),
        *([_database(settings)] if settings.database_url or (settings.data_dir / "db").is_dir() else []),
        _broker(settings),
        _port(settings),
    ]


def _software() -> Iterator[Finding]:
    python = platform.python_version()
    if sys.version_info[:2] >= OLDEST_PYTHON:
        yield Finding("Python", Status.OK, python)
    else:
        yield Finding("Python", Status.MISSING, f"{python} is too old", "Install Python 3.11 or newer.")
    for package in ("torch", "transformers"):
        try:
            yield Finding(package, Status.OK, version(package))
        except PackageNotFoundError:
            yield Finding(package, Status.MISSING, "not installed", f"Run pip install {package}.")
    yield native_core()
    yield from kernel_services()


def _machine(settings: Settings, facts: HardwareFacts) -> Iterator[Finding]:
    cores = f"{facts.cpu.cores} logical cores" + (f", {facts.cpu.usable_cores} usable" if facts.cpu.usable_cores < facts.cpu.cores else "")
    yield Finding("CPU", Status.OK, f"{facts.cpu.name}, {cores}")
    ram = facts.ram
    yield Finding("memory", Status.OK, f"{format_bytes(ram.total_bytes)}, {format_bytes(ram.free_bytes)} free")
    for gpu in facts.gpus:
        holders = f", in use by {', '.join(f'{holder.name or holder.pid}' for holder in gpu.holders)}" if gpu.holders else ""
        size = f"{format_bytes(gpu.total_bytes)}, {format_bytes(gpu.free_bytes)} free"
        yield Finding(f"GPU {gpu.index}", Status.OK, f"{gpu.name}, {size}{holders} ({gpu.uuid})")
    for note in facts.notes:
        yield Finding("GPU", Status.NOTE, note)
    known = {gpu.uuid for gpu in facts.gpus}
    absent = [device for device in settings.devices if not device.startswith("cpu") and device not in known]
    if absent:
        yield Finding(
            "devices", Status.MISSING, f"LOHAN_DEVICES names {', '.join(absent)}, not found", "Name GPUs of the list above, or cpu:0."
        )
    for sentence in choices(facts, settings):
        yield Finding("chosen", Status.OK, sentence)
    if not hasattr(os, "pidfd_open"):
        yield Finding("kernel", Status.MISSING, "no pidfd_open", "Use Linux 5.3 or newer.")


def _folders(settings: Settings) -> Iterator[Finding]:
    """Every folder that is written to, in which a file is made and removed."""
    try:
        settings.make_folders()
    except StorageError as error:
        yield Finding("data folder", Status.MISSING, f"{error.place}: {error.message}", error.remedy)
        return
    for subject, folder in [("data folder", settings.data_dir), *(("state folder", folder) for folder in settings.state_folders)]:
        try:
            with tempfile.TemporaryFile(dir=folder):
                pass
            yield Finding(subject, Status.OK, f"{folder} can be written to")
        except OSError as error:
            yield Finding(subject, Status.MISSING, f"{folder}: {error.strerror}", "Give this user the folder, or name another.")


def _models(settings: Settings) -> Iterator[Finding]:
    for folder in settings.model_dirs:
        if folder.is_dir() and os.access(folder, os.R_OK | os.X_OK):
            yield Finding("model folder", Status.OK, f"{folder} can be read")
        else:
            yield Finding("model folder", Status.MISSING, f"{folder} cannot be read", "Correct LOHAN_MODEL_DIRS, or mount the drive.")
    if not settings.model_dirs:
        text = "LOHAN_MODEL_DIRS is not set: only the sample model can be registered"
        yield Finding("model folder", Status.NOTE, text)


def _database(settings: Settings) -> Finding:
    """SQLite is asked for its version as well: an old one can corrupt a database that several processes use."""
    try:
        engine = create_db_engine(settings)
    except LohanError as error:
        return Finding("database", Status.MISSING, error.message, error.remedy)
    try:
        check_connection(engine)
        name = {"sqlite": "SQLite", "postgresql": "PostgreSQL"}.get(engine.dialect.name, engine.dialect.name)
        numbers = ".".join(str(part) for part in engine.dialect.server_version_info or ())
        return Finding("database", Status.OK, f"{name} {numbers} answers")
    except DBAPIError as error:
        place = "LOHAN_DATABASE_URL" if settings.database_url else str(settings.data_dir / "db")
        first_line = (str(error.orig).splitlines() or [""])[0]
        return Finding("database", Status.MISSING, f"does not answer: {first_line}", f"Start the server, or correct {place}.")
    finally:
        engine.dispose()


def _broker(settings: Settings) -> Finding:
    if settings.broker_url is not None:
        if answers(settings):
            return Finding("broker", Status.OK, "the server of LOHAN_BROKER_URL answers")
        return Finding("broker", Status.MISSING, "the server of LOHAN_BROKER_URL does not answer", "Start it, or correct the address.")
    try:
        binary = find_broker_binary()
    except LohanError as error:
        return Finding("broker", Status.MISSING, error.message, error.remedy)
    words = ""
    with suppress(OSError, subprocess.SubprocessError):
        words = subprocess.run([str(binary), "--version"], capture_output=True, text=True, timeout=10, check=False).stdout.strip()
    number = next((word.removeprefix("v=") for word in words.split() if word.startswith("v=")), "")
    running = "running" if answers(settings) else "started by `lohan up`"
    return Finding("broker", Status.OK, f"{binary.name} {number}, {running}, on {settings.broker_socket}")


def _port(settings: Settings) -> Finding:
    lock = FileLock(settings.data_dir / "up.lock")
    if is_held(lock.path):
        note = lock.read_note()
        return Finding("appliance", Status.OK, f"runs: process {note.get('pid', '(unknown)')} at {note.get('url', '(unknown)')}")
    try:
        with closing(listen(settings)):
            return Finding("port", Status.OK, f"{settings.host}:{settings.port} is free")
    except LohanError as error:
        return Finding("port", Status.MISSING, error.message, error.remedy)
