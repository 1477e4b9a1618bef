"""A process that is killed while it keeps a step under a name: `python -m tests.engine.named_child FOLDER`, a folder for each instant."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from lohan.memory.store import StoreFile
from lohan.states.copies import Copier
from lohan.states.record import RecordFile
from tests.engine.state_files import make_step, opened

STRIDE = 3
"""Of the instants, so many are passed over; the last one is the end."""


def _die_when(countdown: list[int], owner: Any, name: str) -> None:
    """Before the call of `owner.name` at which the countdown comes to its end."""
    original = getattr(owner, name)

    def counting(*values: Any, **options: Any) -> Any:
        countdown[0] -= 1
        if countdown[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*values, **options)

    setattr(owner, name, counting)


def _keep_and_die(folder: Path, at: int) -> None:
    with opened([folder]) as states:
        make_step(states, 1)
        countdown = [at]
        for owner, name in ((Copier, "copy"), (StoreFile, "sync"), (RecordFile, "write"), (RecordFile, "begin"), (Path, "rename")):
            _die_when(countdown, owner, name)
        states.keep("one")
        states.named.finish()
    os._exit(0)


def main() -> None:
    """Die once between copies of parts, syncs and renames each, until one comes to its end."""
    torch.set_num_threads(1)
    for at in range(1, 1000, STRIDE):
        child = os.fork()  # before any thread is started
        if child == 0:
            _keep_and_die(Path(sys.argv[1]) / str(at), at)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            return
        assert os.WTERMSIG(status) == signal.SIGKILL, status


if __name__ == "__main__":
    main()
