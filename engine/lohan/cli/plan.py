"""`lohan plan`: how a run's bytes would be divided, and how long a step would take. Loads torch only to look at a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lohan.cli.data_folder import ProfileFolder, StateDirectories, profile_folder, state_directories
from lohan.cli.measuring import errors_in_words
from lohan.errors import ConfigError

if TYPE_CHECKING:
    from lohan.config import EngineSection, TrainingSection
    from lohan.planning.plan import Plan

RUN_FILE_SUFFIX = ".toml"


def plan(
    what: Annotated[
        Path,
        typer.Argument(metavar="MODEL|RUN.toml", help="A model folder or GGUF file, with the options below; or a run's configuration."),
    ],
    batch: Annotated[int | None, typer.Option(min=1, help="Rows of a step. Unset: 8.")] = None,
    seq: Annotated[int | None, typer.Option(min=8, help="Tokens of a row. Unset: 512.")] = None,
    precision: Annotated[str | None, typer.Option(help="bf16, or fp32. Unset: bf16 where the device has instructions for it.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:N or a GPU's UUID. Unset: auto.")] = None,
    durability: Annotated[str | None, typer.Option(help="step, snapshot or none. Unset: step.")] = None,
    clip: Annotated[str | None, typer.Option(help="none, per_unit or global. Unset: none.")] = None,
    policy: Annotated[str | None, typer.Option(help="What decides about activations. Unset: holistic.")] = None,
    gpu_gib: Annotated[float | None, typer.Option(min=0, help="The GPU's memory is taken for so large, in GiB.")] = None,
    ram_gib: Annotated[float | None, typer.Option(min=0, help="Host memory the run may hold, in GiB.")] = None,
    directory: StateDirectories = None,
    profiles: ProfileFolder = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Show how a run's bytes would be divided over GPU memory, RAM and SSD, and how long a step would take, without starting it."""
    given = {
        "--batch": batch,
        "--seq": seq,
        "--precision": precision,
        "--device": device,
        "--durability": durability,
        "--clip": clip,
        "--policy": policy,
        "--gpu-gib": gpu_gib,
        "--ram-gib": ram_gib,
    }
    with errors_in_words():
        if what.suffix == RUN_FILE_SUFFIX:
            result = _plan_of_run(what, given, profile_folder(profiles))
        else:
            result = _plan_of_model(what, given, state_directories(directory), profile_folder(profiles))
    if as_json:
        print(result.model_dump_json(indent=2))
    else:
        from lohan.cli.show_plan import print_plan

        print_plan(result)


def _plan_of_run(file: Path, given: Mapping[str, object], profiles: Path) -> Plan:
    from lohan.config import load_run_config
    from lohan.training.plan_run import plan_run

    for option, value in given.items():
        if value is not None:
            raise ConfigError(
                f"{option} is given beside a run's configuration, which says that itself",
                place=str(file),
                remedy="Change the file, or name a model.",
            )
    config = load_run_config(file)
    if config.engine.profiles is None:
        config = config.model_copy(update={"engine": config.engine.model_copy(update={"profiles": profiles})})
    return plan_run(config)


def _plan_of_model(model: Path, given: Mapping[str, object], directories: tuple[Path, ...], profiles: Path) -> Plan:
    from lohan.training.plan_run import plan_model

    training, engine = _sections(given, directories, profiles)
    return plan_model(model, training, engine, directories)


def _sections(given: Mapping[str, object], directories: tuple[Path, ...], profiles: Path) -> tuple[TrainingSection, EngineSection]:
    """The settings of a run as the options have them.

    Raises:
        ConfigError: a value that is not allowed; all of them at once.
    """
    from lohan.config import parse_run_config
    from lohan.hardware.probe import probe
    from lohan.planning.planner import default_precision
    from lohan.units import GIB

    def of(**options: str) -> dict[str, object]:
        return {field: given[option] for field, option in options.items() if given[option] is not None}

    engine = of(device="--device", durability="--durability", policy="--policy")
    for field, option in (("gpu_memory_bytes", "--gpu-gib"), ("host_memory_bytes", "--ram-gib")):
        size = given[option]
        if isinstance(size, float):
            engine[field] = round(size * GIB)
    values: dict[str, object] = {
        "model": {"path": "model"},
        "data": {"path": "data"},
        "output": {"directory": "output"},
        "training": of(batch_size="--batch", sequence_length="--seq", precision="--precision", clip="--clip"),
        "engine": {**engine, "state_directories": list(directories), "profiles": profiles},
    }
    config = parse_run_config(values, place="lohan plan")
    training = config.training
    if given["--precision"] is None:
        training = training.model_copy(update={"precision": default_precision(config.engine, probe(directories))})
    return training, config.engine
