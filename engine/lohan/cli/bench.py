"""`lohan bench adam`, `io` and `step`: measures, shows a table or prints the JSON document. Loads torch only when measuring."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lohan.bench.step_options import DEFAULT_STEPS, DEFAULT_WARMUP, SETTING_FIELDS, StateKind, StatesTier, StepOptions
from lohan.bench.step_shapes import ShapeName
from lohan.cli.measuring import errors_in_words, terminated_in_order
from lohan.config import ActivationPolicy, Clip, Durability, GradientBuffers, KernelSet, Precision, UpdateSchedule
from lohan.errors import ConfigError
from lohan.hardware.transfers import Engine, Operation
from lohan.planning.schedule import EXPECTED_CLIP_RATE
from lohan.training.tracing import check_writable
from lohan.units import parse_bytes

if TYPE_CHECKING:
    from lohan.bench.records import Record, Watcher

AsJson = Annotated[bool, typer.Option("--json", help="Print the JSON document instead of the table.")]
Output = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the JSON document to this file, too.")]
Rounds = Annotated[int | None, typer.Option(min=1, help="Counted rounds; medians over them are given.")]


def make_application() -> typer.Typer:
    """The group `bench`."""
    application = typer.Typer(
        no_args_is_help=True, help="Measure this machine: the CPU optimizer, file transfers beside fio, and whole training steps."
    )
    application.command("adam")(adam)
    application.command("io")(io)
    application.command("step")(step)
    return application


def adam(
    elements: Annotated[int | None, typer.Option(min=1, help="Parameters in each array; unset: 50 M, fewer if memory is short.")] = None,
    rounds: Rounds = None,
    threads: Annotated[int, typer.Option(min=0, help="Of every system; 0: one for each CPU this process may use.")] = 0,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Compare the CPU optimizer with torch's, DeepSpeed's and bitsandbytes', all in one run, and with the memory's own speed."""

    def measure(watcher: Watcher) -> list[Record]:
        from lohan.bench.adam import DEFAULT_ROUNDS, run

        return run(elements=elements, rounds=rounds or DEFAULT_ROUNDS, threads=threads, watcher=watcher)

    with errors_in_words():
        _bench("adam", measure, as_json=as_json, output=output)


def io(
    directory: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FOLDER", envvar="LOHAN_STATE_DIRS", help="Where to measure; again for more drives, files are striped over all."
        ),
    ] = None,
    size: Annotated[str, typer.Option(metavar="BYTES", help="Of the file in each folder.")] = "1G",
    block: Annotated[list[str] | None, typer.Option(metavar="BYTES", help="Block size; may be repeated. Unset: 256K, 1M, 4M.")] = None,
    depth: Annotated[
        list[int] | None, typer.Option(min=1, max=256, help="Blocks in flight in each folder; may be repeated. Unset: 8, 32.")
    ] = None,
    engine: Annotated[list[Engine] | None, typer.Option(help="May be repeated. Unset: both.")] = None,
    operation: Annotated[list[Operation] | None, typer.Option(help="May be repeated. Unset: all.")] = None,
    rounds: Rounds = None,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Compare reading and writing the state directories with fio on the same files, and say which setting is chosen for the engine."""
    with errors_in_words():
        from lohan.bench.io import DEFAULT_BLOCK_BYTES, DEFAULT_DEPTHS, DEFAULT_ROUNDS, IoOptions, run

        options = IoOptions(
            directories=tuple(directory or [Path.cwd()]),
            size_bytes=_bytes(size, "--size"),
            engines=tuple(dict.fromkeys(engine or Engine)),
            operations=tuple(dict.fromkeys(operation or Operation)),
            block_bytes=tuple(dict.fromkeys(_bytes(text, "--block") for text in block)) if block else DEFAULT_BLOCK_BYTES,
            depths=tuple(dict.fromkeys(depth)) if depth else DEFAULT_DEPTHS,
            rounds=rounds or DEFAULT_ROUNDS,
        )
        _bench("io", lambda watcher: run(options, watcher), as_json=as_json, output=output, directories=options.directories)


StateFolders = Annotated[
    list[Path] | None,
    typer.Option(metavar="FOLDER", envvar="LOHAN_STATE_DIRS", help="For states on disk; again for more drives. Unset: this folder."),
]
ProfileFolder = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="Plan by what `lohan profile` measured, and record the forecast. Unset: plans without one."),
]
Swaps = Annotated[
    list[str] | None, typer.Option(metavar="BYTES", help="Of activations, that leave the GPU with policy holistic; may be repeated.")
]
TraceFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write each setting's last step for ui.perfetto.dev; names are joined to FILE.")
]
Append = Annotated[bool, typer.Option("--append", help="Join the records to those that --output holds, replacing equal settings.")]


def step(
    shape: Annotated[ShapeName, typer.Option(help="Which Llama.")] = ShapeName.LLAMA_3_43B,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Rows of a step; may be repeated. Unset: 8.")] = None,
    sequence: Annotated[int, typer.Option(min=8, help="Tokens of a row.")] = 1024,
    schedule: Annotated[list[UpdateSchedule] | None, typer.Option(help="When updates run; may be repeated. Unset: all.")] = None,
    states: Annotated[StateKind | None, typer.Option(help="Unset: split in bf16, fp32 in fp32.")] = None,
    states_tier: Annotated[list[StatesTier] | None, typer.Option(help="Where the states lie; may be repeated. Unset: ram.")] = None,
    directory: StateFolders = None,
    tmpfs_directory: Annotated[Path, typer.Option(metavar="FOLDER", help="For states on a tmpfs.")] = Path("/dev/shm"),  # noqa: S108
    durability: Annotated[Durability, typer.Option(help="What a run could be resumed from.")] = Durability.NONE,
    clip: Annotated[Clip, typer.Option(help="What is done about large gradients.")] = Clip.NONE,
    max_norm: Annotated[float, typer.Option(help="The largest norm that clipping leaves.")] = 1.0,
    clip_rate: Annotated[
        float, typer.Option(metavar="SHARE", help="Of the steps, that plans expect to be clipped; a run learns it from its first ones.")
    ] = EXPECTED_CLIP_RATE,
    gpu_cap: Annotated[str | None, typer.Option(metavar="BYTES", help="Of the GPU's memory, for plan and allocator. Unset: all.")] = None,
    host_cap: Annotated[str | None, typer.Option(metavar="BYTES", help="Of host memory, states in RAM included. Unset: all.")] = None,
    micro_batch: Annotated[int | None, typer.Option(min=1, help="Rows at once in a block. Unset: the plan's.")] = None,
    profiles: ProfileFolder = None,
    policy: Annotated[list[ActivationPolicy] | None, typer.Option(help="What decides about activations; may be repeated.")] = None,
    swap: Swaps = None,
    activation_ram: Annotated[str | None, typer.Option(metavar="BYTES", help="Of host memory, for activations. Unset: all.")] = None,
    gradient_buffers: Annotated[GradientBuffers, typer.Option(help="Host memory for gradients that wait.")] = GradientBuffers.AUTO,
    kernels: Annotated[list[KernelSet] | None, typer.Option(help="What computes the blocks; may be repeated. Unset: auto.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of a setting in a round.")] = DEFAULT_STEPS,
    warmup: Annotated[int, typer.Option(min=0, help="Steps before them.")] = DEFAULT_WARMUP,
    rounds: Annotated[int, typer.Option(min=1, help="How often settings that do not fit together are set up.")] = 1,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or a GPU's UUID.")] = "auto",
    precision: Annotated[Precision, typer.Option(help="What the device computes in.")] = Precision.BF16,
    trace: TraceFile = None,
    as_json: AsJson = False,
    output: Output = None,
    append: Append = False,
) -> None:
    """Time whole training steps of a randomly initialised Llama on random tokens, the update schedules beside each other."""
    with errors_in_words():
        _check_files(output, trace, append=append)
        options = StepOptions(
            shape=shape,
            batches=tuple(dict.fromkeys(batch or [8])),
            sequence=sequence,
            schedules=tuple(dict.fromkeys(schedule or UpdateSchedule)),
            states=states,
            tiers=tuple(dict.fromkeys(states_tier or [StatesTier.RAM])),
            directories=tuple(directory or [Path.cwd()]),
            tmpfs_directory=tmpfs_directory,
            durability=durability,
            clip=clip,
            max_norm=max_norm,
            clip_rate=clip_rate,
            gpu_cap_bytes=None if gpu_cap is None else _bytes(gpu_cap, "--gpu-cap"),
            host_cap_bytes=None if host_cap is None else _bytes(host_cap, "--host-cap"),
            micro_batch=micro_batch,
            device=device,
            precision=precision,
            profiles=None if profiles is None else profiles.absolute(),
            policies=tuple(dict.fromkeys(policy or [ActivationPolicy.HOLISTIC])),
            swapped_bytes=tuple(dict.fromkeys(_bytes(size, "--swap") for size in swap)) if swap else (None,),
            activation_ram_bytes=None if activation_ram is None else _bytes(activation_ram, "--activation-ram"),
            gradient_buffers=gradient_buffers,
            kernels=tuple(dict.fromkeys(kernels or [KernelSet.AUTO])),
            steps=steps,
            warmup=warmup,
            rounds=rounds,
            trace=None if trace is None else trace.absolute(),
        )
        from lohan.bench.step import run

        save = partial(_save, "step", output, options.used_directories, append=append)
        measure = partial(run, options, on_measured=save)
        _bench("step", measure, as_json=as_json, output=output, directories=options.used_directories, append=append)


def _check_files(output: Path | None, trace: Path | None, *, append: bool) -> None:
    if append and output is None:
        raise ConfigError("there is no file to append to", place="--append", remedy="Give --output FILE.")
    if trace is not None:
        check_writable(trace)


def _bench(
    name: str,
    measure: Callable[[Watcher], list[Record]],
    *,
    as_json: bool,
    output: Path | None,
    directories: Sequence[Path] = (),
    append: bool = False,
) -> None:
    from lohan.bench import records, show

    with terminated_in_order(), show.stdout_kept_clean(), show.watcher_on_stderr() as watcher:
        measured = measure(watcher)
    content = _save(name, output, directories, measured, append=append)
    if as_json:
        sys.stdout.write(records.as_json(content))
    else:
        {"adam": show.print_adam, "io": show.print_io, "step": show.print_step}[name](measured)


def _save(name: str, output: Path | None, directories: Sequence[Path], measured: list[Record], *, append: bool) -> Record:
    """The records as a document, which is written to `output` where there is one."""
    from lohan.bench import records

    content = records.document(name, measured, directories=directories)
    if output is not None:
        records.write_document(output, records.appended(output, content, key=SETTING_FIELDS) if append else content)
    return content


def _bytes(text: str, option: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ConfigError(str(error), place=option, remedy="Give a number with K, M or G behind it, e.g. 256K, 4M, 1G.") from None
