"""Carries out a schedule: kills, wipes, stops and fills, and writes down what it did to whom."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psutil

from lohan_app.redis_client import connect
from lohan_app.worker.launcher import RunFiles
from lohan_app.worker.verdict import MAX_LOST_ATTEMPTS
from tests.soak.arrangements import Appliance
from tests.soak.schedule import Act, Stroke, Victim
from tests.soak.victims import Found, find

LONGEST_OUTAGE_SECONDS = 8.0
LOOK_SECONDS = 0.05
FILLER = "filler"


class Killer:
    """Works in the thread that calls `work`, which also keeps the services running.

    Args:
        diary: gets one JSON object a line for every stroke.
        drive: the folder of the drive that is filled, where there is one.
    """

    def __init__(self, appliance: Appliance, diary: Path, drive: Path | None) -> None:
        self.done: Counter[str] = Counter()
        """How often each kind of stroke hit something."""
        self._appliance, self._diary, self._drive = appliance, diary, drive
        self._acts: dict[Act, Callable[[float], Any]] = {
            Act.FLUSH_BROKER: self._flush_broker,
            Act.WIPE_BROKER: self._wipe_broker,
            Act.RESTART_DATABASE: self._restart_database,
            Act.FILL_DRIVE: self._fill_drive,
            Act.EMPTY_DRIVE: self._empty_drive,
        }

    def work(self, schedule: Sequence[Stroke], seconds: float) -> None:
        """Do all strokes in their time, and end `seconds` after the call with everything mended."""
        began = time.monotonic()
        due = list(schedule)
        while (passed := time.monotonic() - began) < seconds:
            self._appliance.keep()
            if due and passed >= due[0].at_seconds:
                self._strike(due.pop(0), passed)
            time.sleep(LOOK_SECONDS)
        if self._drive is not None:
            self._empty_drive(0.0)

    def _strike(self, stroke: Stroke, passed_seconds: float) -> None:
        said = self._acts[stroke.what](stroke.pick) if isinstance(stroke.what, Act) else self._kill(stroke.what, stroke.pick)
        if said is not None:
            self.done[str(stroke.what)] += 1
        line = {"planned_seconds": stroke.at_seconds, "seconds": round(passed_seconds, 2), "what": str(stroke.what), "hit": said}
        with self._diary.open("a", encoding="utf-8") as diary:
            diary.write(json.dumps(line) + "\n")

    # ------------------------------------------------------------ processes
    def _kill(self, victim: Victim, pick: float) -> Any:
        """SIGKILL to one of the kind; what was hit, or None where there is none that may be killed now."""
        found = [one for one in find(self._appliance.place, victim) if not self._is_last_try(one)]
        if not found:
            return None
        chosen = found[int(pick * len(found))]
        with suppress(psutil.NoSuchProcess):
            chosen.process.send_signal(signal.SIGKILL)
            return {"pid": chosen.process.pid, "run": chosen.run_id}
        return None

    def _is_last_try(self, found: Found) -> bool:
        """Whether this trainer's run is given up if it is killed: the product says that it tries three times at one place."""
        if found.victim is not Victim.TRAINER or found.run_id is None:
            return False
        with suppress(psutil.Error):
            command = found.process.cmdline()
            attempt = int(command[command.index("--attempt") + 1])
            files = RunFiles(self._appliance.settings.run_folder(found.run_id))
            tries, has_come_further = tries_at_this_place(files.events, attempt=attempt)
            # What a snapshot has recorded is the trainer's knowledge alone.
            return tries >= MAX_LOST_ATTEMPTS and not (has_come_further and 'durability = "step"' in files.config.read_text())
        return False

    # ------------------------------------------------------------ the broker
    def _flush_broker(self, _pick: float) -> Any:
        with suppress(Exception), closing(connect(self._appliance.settings)) as client:
            client.flushall()
            return "flushed"
        return None

    def _wipe_broker(self, _pick: float) -> Any:
        hit = self._kill(Victim.BROKER, 0.0)
        folder = self._appliance.broker_folder
        for path in list(folder.iterdir()):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif not path.is_socket():
                path.unlink(missing_ok=True)
        return hit

    # ------------------------------------------------------------ the database
    def _restart_database(self, pick: float) -> Any:
        database = self._appliance.services["database"]
        database.stop()
        database.keep_away(pick * LONGEST_OUTAGE_SECONDS)
        return {"outage_seconds": round(pick * LONGEST_OUTAGE_SECONDS, 1)}

    # ------------------------------------------------------------ the drive
    def _fill_drive(self, _pick: float) -> Any:
        """Take the last block: a request for more than there is fails as a whole, so it is asked for less each time."""
        assert self._drive is not None
        descriptor = os.open(self._drive / FILLER, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            size = os.fstat(descriptor).st_size
            wanted = _free_bytes(self._drive)
            while wanted >= 4096:
                try:
                    os.posix_fallocate(descriptor, size, wanted)
                    size += wanted
                except OSError:
                    wanted //= 2
        finally:
            os.close(descriptor)
        return {"free_bytes": _free_bytes(self._drive)}

    def _empty_drive(self, _pick: float) -> Any:
        assert self._drive is not None
        (self._drive / FILLER).unlink(missing_ok=True)
        return {"free_bytes": _free_bytes(self._drive)}


def _free_bytes(folder: Path) -> int:
    """What root may still write."""
    found = os.statvfs(folder)
    return found.f_bfree * found.f_frsize


def tries_at_this_place(events: Path, *, attempt: int) -> tuple[int, bool]:
    """How many attempts in a row, `attempt` included, have gone on from the step where it did, and whether it has come further since."""
    begun: dict[int, int] = {}
    last_step = 0
    with suppress(FileNotFoundError):
        for line in events.read_text(errors="replace").splitlines():
            with suppress(ValueError):
                event = json.loads(line)
                if event["type"] == "started":
                    begun[event["attempt"]] = event["resumed_step"] or 0
                elif event["type"] == "step" and event["attempt"] == attempt:
                    last_step = event["step"]
    tries = step = 0
    for number in range(1, attempt + 1):
        # One that ended before its first word went on from where the one before it did.
        tries = tries + 1 if begun.get(number, step) == step else 1
        step = begun.get(number, step)
    # No step begins before the one before it is recorded.
    return tries, last_step > step + 1
