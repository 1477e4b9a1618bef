"""The child's end of the line protocol that `StepChild` speaks: what a process does that is asked for one step at a time.

It reads lines from standard input: the task as JSON, then `step` and `pause` as often as wanted, then `finish`. Each is answered with one
line of JSON, an object with one field: `ready`, `step`, `pause`, `result`, or `error` with what was wrong, after which it ends. It also
ends when standard input does, that is, with the process that started it; whatever happens, its folders are then removed.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Protocol, Self, TypeVar

from lohan.errors import LohanError

if TYPE_CHECKING:
    from lohan.bench.records import Record

Answer = Callable[[Any], None]

_MAX_REASON_CHARACTERS: Final = 500


class ServedTask(Protocol):
    """What to do, and where."""

    @property
    def folders(self) -> tuple[Path, ...]: ...


class ServedRun(Protocol):
    """Training that takes single steps; a context that frees what it holds."""

    setup_seconds: float

    def step(self) -> Record:
        """A step behind another one: `seconds` and `loss`."""

    def pause(self) -> None:
        """Finish whatever the steps have begun."""

    def use(self, choice: str) -> None:
        """Go on in another way, which the task's kind of run understands."""

    def finish(self) -> Record:
        """What the whole run took."""

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...


AnyTask = TypeVar("AnyTask", bound=ServedTask)


def serve(read_task: Callable[[str], AnyTask], start: Callable[[AnyTask], ServedRun]) -> int:
    """Serve standard input; returns the exit status."""
    answer = _take_over_standard_output()
    line = sys.stdin.readline()
    if not line:
        return 1
    task = read_task(line)
    try:
        with start(task) as run:
            answer({"ready": run.setup_seconds})
            _obey(run, sys.stdin, answer)
    except Exception as error:  # noqa: BLE001 - whatever it was, the record must say it
        words = str(error) if isinstance(error, LohanError) else f"{type(error).__name__}: {error}"
        answer({"error": " ".join(words.split())[:_MAX_REASON_CHARACTERS]})
        return 1
    finally:
        for folder in task.folders:
            shutil.rmtree(folder, ignore_errors=True)
    return 0


def _take_over_standard_output() -> Answer:
    """Answers go to what was standard output; what libraries print goes to standard error."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(content: Any) -> None:
        channel.write(json.dumps(content) + "\n")
        channel.flush()

    return answer


def _obey(run: ServedRun, orders: Iterable[str], answer: Answer) -> None:
    for order in orders:
        word, _, rest = order.strip().partition(" ")
        match word:
            case "step":
                answer({"step": run.step()})
            case "pause":
                run.pause()
                answer({"pause": None})
            case "use":
                run.use(rest)
                answer({"use": None})
            case "finish":
                answer({"result": run.finish()})
                return
            case other:
                raise ValueError(f"there is no order {other!r}")
