"""Running a test's body in a process of its own: limits, forks and lost privileges must not reach the test run."""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
import sys
import textwrap


def run_child(body: str, *arguments: object) -> str:
    """Run `body` as a script (`sys.argv[1:]` are the arguments); returns what it prints.

    Raises:
        AssertionError: it failed or did not end within two minutes; the text holds its error output.
    """
    command = [sys.executable, "-c", textwrap.dedent(body), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env={**os.environ, "PYTHONWARNINGS": "ignore"})
    assert done.returncode == 0, f"exit status {done.returncode}: {done.stderr}"
    return done.stdout


def forbid_io_uring(error_number: int) -> None:
    """Have io_uring_setup, _enter and _register fail with `error_number` in this process from now on, as a container's profile does.

    A seccomp filter cannot be taken back: for processes of their own only.

    Raises:
        OSError: the kernel takes no filter.
    """
    load_word, jump_if_at_least, jump_if_above, give_back = 0x20, 0x35, 0x25, 0x06
    io_uring_setup, io_uring_register = 425, 427  # on every architecture
    allow, fail = 0x7FFF0000, 0x00050000
    program = b"".join(
        struct.pack("HBBI", *instruction)
        for instruction in [
            (load_word, 0, 0, 0),  # seccomp_data.nr
            (jump_if_at_least, 0, 1, io_uring_setup),
            (jump_if_above, 0, 1, io_uring_register),
            (give_back, 0, 0, allow),
            (give_back, 0, 0, fail | error_number),
        ]
    )
    libc = ctypes.CDLL(None, use_errno=True)
    code = ctypes.create_string_buffer(program, len(program))
    filter_program = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    set_no_new_privileges, set_seccomp, mode_filter = 38, 22, 2
    for arguments in ((set_no_new_privileges, 1, 0, 0, 0), (set_seccomp, mode_filter, filter_program, 0, 0)):
        if libc.prctl(*arguments) != 0:
            raise OSError(ctypes.get_errno(), "prctl")
