"""Whether a run can go on from what its state directories hold, and from where."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lohan.config import Durability, RunConfig
from lohan.errors import ConfigError, LohanError, ResumeError
from lohan.states.named import read_named_record
from lohan.states.record import StepRecord, read_record
from lohan.training.checkpoint import BEGIN_AGAIN, PAYLOAD_KEY, Checkpoint
from lohan.training.plan_run import state_directories
from lohan.training.setup import remove_states

if TYPE_CHECKING:
    from lohan.training.steps import Course


def is_resumable(config: RunConfig) -> bool:
    """Whether the run keeps what it could be resumed from."""
    return config.engine.durability is not Durability.NONE


def find_checkpoint(config: RunConfig, course: Course, *, resume_from: str | None = None) -> Checkpoint | None:
    """The boundary to go on from. Where there is none, what an earlier attempt left is removed: its space is ours.

    States without the trainer's part are not gone on from: those of step 0, since nothing says which base model they were read from,
    and those of a trainer that fell in its first step before it could hand its part in.

    Args:
        resume_from: the named snapshot to go on from; what the run's own record says does not count then.

    Raises:
        ConfigError: this is no name, or the run keeps nothing to go on from.
        ResumeError: there is one, but of another version of the program, or of a run with other settings or data; or no such snapshot.
        StorageError: a record cannot be read.
    """
    directories = state_directories(config)
    record = _read_named(config, resume_from) if resume_from is not None else read_record(directories) if is_resumable(config) else None
    if record is None or PAYLOAD_KEY not in record.payload:
        remove_states(directories)
        return None
    checkpoint = Checkpoint.from_payload(record.payload)
    if checkpoint.step != record.step:
        raise ResumeError(
            f"the record is of step {record.step}, what it holds is of step {checkpoint.step}",
            place=str(directories[0]),
            remedy=BEGIN_AGAIN,
        )
    checkpoint.check(
        config.training,
        total_steps=course.total_steps,
        data_digest=course.data_digest,
        position=course.sampler.position(checkpoint.step),
    )
    return checkpoint


def _read_named(config: RunConfig, name: str) -> StepRecord:
    if not is_resumable(config):
        raise ConfigError(
            "a run goes on from a named snapshot with durability step or snapshot, not with none",
            place="engine.durability",
            remedy="Use step or snapshot.",
        )
    record = read_named_record(state_directories(config), name)
    if PAYLOAD_KEY not in record.payload:
        raise ResumeError(f"the named snapshot {name} was not kept by a trainer", place=name, remedy="Use it with lohan.init.")
    return record


def can_resume(config: RunConfig) -> bool:
    """Whether the run's state directories hold a record to go on from. One that cannot be read is kept for whoever mends the drive."""
    if not is_resumable(config):
        return False
    try:
        record = read_record(state_directories(config))
    except LohanError:
        return True
    return record is not None and PAYLOAD_KEY in record.payload
