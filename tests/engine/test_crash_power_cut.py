"""The power fails while a trainer works: FS_IOC_SHUTDOWN on a file system of its own, so that only what was made durable is found again.

Where no file system can be mounted, `test_states_power_cut` alone says what a power failure may leave: it rebuilds it from the calls that
make things durable.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from lohan.config import OutputSection, RunConfig
from tests.engine import power_cut
from tests.engine.crash_runs import (
    IS_SHORT,
    LONGEST_SECONDS,
    PLACES,
    SEED,
    Kind,
    References,
    Trainers,
    check_resumption,
    is_done,
    last_words,
)
from tests.engine.resumed_runs import check_equal

KINDS = [Kind("split", place, durability) for place in PLACES for durability in ("step", "snapshot")]
CUTS = 1 if IS_SHORT else 4
"""Of each kind and file system: 24 images with one file system."""

pytestmark = pytest.mark.timeout(300 if IS_SHORT else 0)


@pytest.mark.parametrize("filesystem", ["ext4", "xfs"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_power_is_cut_at_random_instants(
    tmp_path: Path, trainers: Trainers, references: References, kind: Kind, filesystem: str
) -> None:
    """The run's folder, its events and its states lie on the drive; model and rows do not."""
    if refusal := power_cut.refusal(filesystem, to_be_cut=True):
        pytest.skip(refusal)
    expected, seconds = references.get(kind.form)
    instants = random.Random(f"{SEED} {filesystem} {kind}")  # noqa: S311 - not for secrets
    cuts = number = 0
    with power_cut.LoopDrive(tmp_path, filesystem) as drive:
        while cuts < CUTS:
            number += 1
            config, log = on_drive(kind.config(tmp_path / "inputs"), drive.folder / f"run{number}"), tmp_path / f"{number}.log"
            resumed = 0
            while True:
                process = trainers.start(config, log=log)
                process.join(instants.uniform(0.1 * seconds, seconds) if cuts < CUTS else LONGEST_SECONDS)
                if process.exitcode is not None:
                    break
                drive.cut_power()
                process.kill()
                process.join()
                drive.restore_power()
                cuts += 1
                if is_done(config):
                    break
                resumed = check_resumption(config, resumed)
            assert is_done(config), last_words(log, config)
            check_equal(config, expected)


def on_drive(config: RunConfig, directory: Path) -> RunConfig:
    return config.model_copy(update={"output": OutputSection(directory=directory)})
