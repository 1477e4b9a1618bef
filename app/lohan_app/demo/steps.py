"""The demonstration, step by step: a user's whole way from an empty data folder to a fine-tuned model, over REST."""

from __future__ import annotations

import os
import secrets
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from lohan.cli.show_plan import print_plan
from lohan.errors import LohanError
from lohan.planning.plan import Plan
from lohan_app.demo import appliance as appliances
from lohan_app.demo.appliance import Appliance
from lohan_app.demo.client import Client
from lohan_app.demo.corpus import write_dataset
from lohan_app.demo.screen import RunScreen, say
from lohan_app.worker.processes import python_module

FINAL_STATES = ("succeeded", "failed", "cancelled")
# The run has learnt when the loss on the same rows has fallen by a fifth.
LEARNT_RATIO = 0.8
RUN_LIMIT_SECONDS = 3600.0
CANCEL_SECONDS = 120.0
LOG_BYTES = 3000


@dataclass(frozen=True, slots=True)
class Options:
    """What can be chosen on the command line."""

    data_dir: Path
    port: int
    steps: int
    batch_size: int
    sequence_length: int
    learning_rate: float
    stops_at_end: bool
    """Whether the appliance is stopped at the end, rather than left running."""


def run_demo(options: Options, console: Console, *, appliance: Appliance) -> str:
    """Everything after the appliance answers; returns the verdict, the last line to print.

    Raises:
        LohanError: a step failed, or the run did not learn.
    """
    client = Client(appliance.url, _bootstrap_key(options.data_dir))
    base_model = _sample_model(client, console)
    dataset = _dataset(client, console, options.data_dir)
    body: dict[str, Any] = {
        "base_model_id": base_model["id"],
        "dataset_id": dataset["id"],
        "training": {
            "max_steps": options.steps,
            "batch_size": options.batch_size,
            "sequence_length": options.sequence_length,
            "learning_rate": options.learning_rate,
            "warmup_steps": max(1, options.steps // 10),
        },
        "engine": {},
    }
    print_plan(_plan(client, body))
    run = client.post("/runs", {"name": "demo", "skip_bad_rows": False, **body}, **{"Idempotency-Key": secrets.token_hex(16)})
    say(console, f"run {run['id']} is queued; watch it at {appliance.url}/runs/{run['id']}")
    try:
        return _verdict(_follow(client, console, run["id"]))
    except BaseException:
        # A trainer outlives the appliance on purpose: one that nobody waits for any more is cancelled first.
        if options.stops_at_end and appliance.is_ours:
            _cancel(client, run["id"])
        raise


def _plan(client: Client, body: dict[str, Any]) -> Plan:
    """The plan of what is asked for; where it falls to a CPU, `body` is changed to fp32 first.

    A CPU without bf16 instructions multiplies bf16 matrices 5 to 30 times slower than fp32 ones (measured with torch 2.13).
    """
    plan = Plan.model_validate(client.post("/plans", body))
    if not plan.device.startswith("cpu"):
        return plan
    body["training"]["precision"] = "fp32"
    return Plan.model_validate(client.post("/plans", body))


def _bootstrap_key(data_dir: Path) -> str:
    """An API key made by the product's own command, for whoever can read the data folder."""
    command = python_module("lohan_app.cli", "api-key", "create", "demo", "--scopes", "read,datasets,runs,admin")
    done = subprocess.run(
        command, env=os.environ | {"LOHAN_DATA_DIR": str(data_dir)}, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode != 0 or not done.stdout.strip():
        raise LohanError(f"no API key was made: {done.stderr.strip()}", place="lohan api-key create demo", remedy="Run `make doctor`.")
    return done.stdout.split()[-1]


def _sample_model(client: Client, console: Console) -> dict[str, Any]:
    """Register the sample model, or find it registered."""
    known = [model for model in client.get("/base-models")["items"] if model["source"] == "sample"]
    model = known[0] if known else client.post("/base-models", {"source": "sample"})
    ready = client.wait(f"/base-models/{model['id']}", lambda found: found["state"] != "inspecting", seconds=300)
    _require(ready, "ready", "the sample model")
    say(console, f"base model {ready['name']} is registered")
    return ready


def _dataset(client: Client, console: Console, data_dir: Path) -> dict[str, Any]:
    """Build the rows, send them, wait for the verdict on each."""
    path = data_dir / "cache" / "chatterbot-english.jsonl"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    rows = write_dataset(path)
    dataset = client.upload("/datasets", path, name="chatterbot-english")
    ready = client.wait(f"/datasets/{dataset['id']}", lambda found: found["state"] not in ("uploading", "validating"), seconds=300)
    _require(ready, "ready", "the dataset")
    say(console, f"{rows} dialogs are uploaded and checked")
    return ready


def _require(found: dict[str, Any], state: str, what: str) -> None:
    if found["state"] == state:
        return
    problem = found.get("problem") or {}
    message = f"{what} is {found['state']!r}, not {state!r}: {problem.get('message', 'no reason was given')}"
    raise LohanError(message, place=problem.get("place"), remedy=problem.get("remedy"))


def _follow(client: Client, console: Console, run_id: str) -> dict[str, Any]:
    """Show the run until it ends; a run that fails is an error with its reason and the end of its log."""

    def shown(run: dict[str, Any]) -> bool:
        screen.show(run)
        return run["state"] in FINAL_STATES

    with RunScreen(console) as screen:
        run = client.wait(f"/runs/{run_id}", shown, seconds=RUN_LIMIT_SECONDS)
    if run["state"] != "succeeded":
        problem = run.get("problem") or {}
        reason = problem.get("message") or run.get("state_reason") or "no reason was given"
        message = f"the run is {run['state']}: {reason}\n{_log_end(client, run_id)}"
        raise LohanError(message, place=problem.get("place") or f"run {run_id}", remedy=problem.get("remedy"))
    return run


def _cancel(client: Client, run_id: str) -> None:
    with suppress(LohanError):
        client.post(f"/runs/{run_id}/cancel", {})
        client.wait(f"/runs/{run_id}", lambda run: run["state"] in FINAL_STATES, seconds=CANCEL_SECONDS)


def _log_end(client: Client, run_id: str) -> str:
    size = int(client.get(f"/runs/{run_id}/log", offset=0)["size"])
    text: str = client.get(f"/runs/{run_id}/log", offset=max(0, size - LOG_BYTES))["text"]
    return text


def _verdict(run: dict[str, Any]) -> str:
    first, last = run["first_loss"], run["last_loss"]
    if first is None or last is None or not last < LEARNT_RATIO * first:
        raise LohanError(
            f"the loss went from {first} to {last}; below {LEARNT_RATIO} of the first was expected",
            place=f"run {run['id']}",
            remedy="Give it more steps: python -m lohan_app.demo --steps 40",
        )
    return f"run {run['id']} succeeded, loss {first:.4f} -> {last:.4f}"


def start_or_find(options: Options) -> Appliance:
    """The appliance of this data folder: the one that runs, or a new one."""
    return appliances.find_running(options.data_dir) or appliances.start(options.data_dir, options.port)
