"""Running a test's body in a process of its own: limits, forks and lost privileges must not reach the test run."""

from __future__ import annotations

import os
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
