"""The command line of the demonstration."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

from lohan.errors import LohanError
from lohan_app.demo.appliance import Appliance
from lohan_app.demo.screen import say
from lohan_app.demo.steps import Options, run_demo, start_or_find


def main(arguments: list[str] | None = None) -> int:
    parsed = _parser().parse_args(arguments)
    options = Options(
        data_dir=parsed.data_dir.absolute(), port=parsed.port, steps=parsed.steps, batch_size=parsed.batch_size,
        sequence_length=parsed.sequence_length, learning_rate=parsed.learning_rate, stops_at_end=parsed.exit_when_done,
    )  # fmt: skip
    console = Console()
    # Told to end, it parts from the appliance as it does at Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    appliance: Appliance | None = None
    last_line = ""
    try:
        appliance = start_or_find(options)
        _greet(console, appliance)
        last_line = run_demo(options, console, appliance=appliance)
    except LohanError as error:
        _explain(console, error)
    except KeyboardInterrupt:
        say(console, "interrupted" if options.stops_at_end else "interrupted; the run goes on in the appliance")
    if appliance is not None:
        try:
            _part(console, appliance, stops=options.stops_at_end)
        except LohanError as error:
            _explain(console, error)
            return 1
    if last_line:
        say(console, last_line)
    return 0 if last_line else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m lohan_app.demo", description=__doc__)
    parser.add_argument("--data-dir", type=Path, default=Path("demo-data"), help="the appliance's data folder (%(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="first port to try (%(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="optimizer updates (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=4, help="dialogs per update (%(default)s)")
    parser.add_argument("--sequence-length", type=int, default=64, help="tokens per dialog at most (%(default)s)")
    parser.add_argument("--learning-rate", type=float, default=2e-4, help="peak learning rate (%(default)s)")
    parser.add_argument("--exit-when-done", action="store_true", help="stop the appliance at the end instead of leaving it running")
    return parser


def _greet(console: Console, appliance: Appliance) -> None:
    """Address and token come first: whoever watches can log in while the rest is on its way."""
    token = appliance.setup_token()
    say(console, f"the appliance is at {appliance.url}")
    if token:
        say(console, f"make your account with the one-time token: {appliance.url}/setup?token={token}")


def _part(console: Console, appliance: Appliance, *, stops: bool) -> None:
    if stops and appliance.is_ours:
        appliance.stop()
        say(console, "the appliance is stopped")
    else:
        say(console, f"the appliance goes on at {appliance.url}; stop it with: kill {appliance.pid}")


def _explain(console: Console, error: LohanError) -> None:
    console.print(Text(f"demo: {error.message}", style="red"), soft_wrap=True)
    if error.place:
        say(console, f"where: {error.place}")
    if error.remedy:
        say(console, f"what to do: {error.remedy}")


if __name__ == "__main__":
    sys.exit(main())
