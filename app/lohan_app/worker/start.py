"""Arranges its own process, then becomes the given command: `python -I -S start.py [options] -- COMMAND…`.

`subprocess` offers these only through `preexec_fn`, which runs Python between fork and exec and is unsafe beside threads. This file
imports nothing of the package, so it starts in about 20 ms.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import resource
import signal
import sys
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG = 1
EXIT_NOT_STARTED = 125
"""The command was not started: the parent had died, or the gate was closed."""
LIMITS = {
    "address_space": resource.RLIMIT_AS,
    "data": resource.RLIMIT_DATA,
    "cpu_seconds": resource.RLIMIT_CPU,
    "file_bytes": resource.RLIMIT_FSIZE,
    "files": resource.RLIMIT_NOFILE,
    "core": resource.RLIMIT_CORE,
}


def main(arguments: list[str]) -> None:
    options = _parser().parse_args(arguments)
    if options.detach:
        _detach()
    if options.parent:
        _die_with(options.parent, signal.Signals[options.death_signal])
    if options.oom_score_adj is not None:
        # A sandbox may forbid it; the program runs all the same.
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text(str(options.oom_score_adj), encoding="ascii")
    for limit in options.limit:
        _set_limit(limit)
    if options.gate is not None:
        _wait_at_gate(options.gate)
    os.execvp(options.command[0], options.command)  # noqa: S606 - the command is an argument list; a shell is what S606 asks for


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--detach", action="store_true", help="become a session leader without a parent that waits")
    parser.add_argument("--parent", type=int, help="process id of the parent to die with")
    parser.add_argument("--death-signal", default="SIGTERM", help="what the kernel sends when the parent dies")
    parser.add_argument("--oom-score-adj", type=int, help="who the kernel kills first when memory runs out: 1000 first, -1000 never")
    parser.add_argument("--limit", action="append", default=[], metavar="NAME=SOFT[:HARD]", help=f"one of {', '.join(LIMITS)}")
    parser.add_argument("--gate", type=int, metavar="FD", help="start only after a byte came through this descriptor")
    parser.add_argument("command", nargs="+")
    return parser


def _detach() -> None:
    """A new session, and a parent that is gone at once: nobody has to reap the process, and no group signal reaches it."""
    os.setsid()
    if os.fork():
        os._exit(0)


def _die_with(parent: int, death_signal: signal.Signals) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    # The parent may have died before the call above: then no signal will come.
    if os.getppid() != parent:
        sys.exit(EXIT_NOT_STARTED)


def _set_limit(text: str) -> None:
    name, _, values = text.partition("=")
    soft, _, hard = values.partition(":")
    _, ceiling = resource.getrlimit(LIMITS[name])
    wanted = int(hard or soft)
    upper = wanted if ceiling == resource.RLIM_INFINITY else min(wanted, ceiling)
    resource.setrlimit(LIMITS[name], (min(int(soft), upper), upper))


def _wait_at_gate(descriptor: int) -> None:
    """Whoever opens the gate has written down who we are; if it dies before that, the pipe closes and nothing was started."""
    opened = os.read(descriptor, 1)
    os.close(descriptor)
    if not opened:
        sys.exit(EXIT_NOT_STARTED)


if __name__ == "__main__":
    main(sys.argv[1:])
