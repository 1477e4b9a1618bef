"""Writes what a run at rest has recorded as a Hugging Face folder, without training on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lohan.config import Precision, RunConfig
from lohan.errors import EngineError, ResumeError
from lohan.events import EventType, ExitReason, Phase
from lohan.models.export import save_pretrained
from lohan.models.load import empty_model, load_config
from lohan.states.record import read_record
from lohan.streaming.recorded import RecordedWeights
from lohan.training.checkpoint import PAYLOAD_KEY, Checkpoint
from lohan.training.plan_run import state_directories
from lohan.training.resume import is_resumable
from lohan.training.run_lock import RunLockedError, hold_run
from lohan.training.setup import make_optimizer

if TYPE_CHECKING:
    from lohan.training.reporter import Reporter
    from lohan.training.stopping import StopWatch


class ExportJob:
    """Reads the last recorded step of a run and writes it as a folder; the run's states are left as they are.

    The run's own lock is held meanwhile, so that no trainer goes on from what is being read. One parameter at a time is in host memory.

    Args:
        config: of the run that has recorded states.
        folder: what is written; it appears complete or not at all.
        dtype: of the weights; None takes the run's precision.
    """

    def __init__(self, config: RunConfig, folder: Path, reporter: Reporter, stop: StopWatch, *, dtype: Precision | None) -> None:
        self._config, self._folder, self._reporter, self._stop = config, folder, reporter, stop
        self._dtype = dtype or config.training.precision

    def tidy(self, reason: ExitReason) -> None:
        """Nothing: `save_pretrained` removes what it did not finish, whatever ended it."""

    def execute(self) -> None:
        """Do it.

        Raises:
            ResumeError: the run has recorded nothing, or what it has is damaged.
            EngineError: a trainer is at work on the run.
            ModelError: its base model's configuration or tokenizer is gone.
            StopRequested: it was asked to stop; nothing is left.
        """
        config = self._config
        with held(config):
            checkpoint = recorded_checkpoint(config)
            self._reporter.say(EventType.STARTED, device="cpu", precision=str(self._dtype), total_steps=0, resumed_step=0)
            self._reporter.begin(Phase.LOADING_MODEL, f"Opening the states of step {checkpoint.step}.")
            model_config = load_config(config.model.path)
            with open_recorded(config, model_config, checkpoint) as weights:
                self._reporter.begin(Phase.EXPORTING, f"Writing the weights of step {checkpoint.step} as a Hugging Face folder.")
                dtype = _torch_type(self._dtype)
                save_pretrained(weights, model_config, config.model.path, self._folder, dtype=dtype, progress=self._note)

    def _note(self, done: float) -> None:
        self._stop.check()
        self._reporter.progress(done)


@contextlib.contextmanager
def held(config: RunConfig) -> Iterator[None]:
    """Hold the run's lock.

    Raises:
        EngineError: a trainer is at work on the run.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(hold_run(config.output.directory))
        except RunLockedError as error:
            # Its cause would be told in its place: that the system refused a lock.
            raise EngineError("a trainer is at work on the run", place=error.place, remedy="Wait for it, or pause the run.") from None
        yield


def open_recorded(config: RunConfig, model_config: Any, checkpoint: Checkpoint) -> RecordedWeights:
    """What the run's states hold of the boundary, with their layout of then.

    Raises:
        ResumeError: they are damaged, or belong to another model.
    """
    model = empty_model(model_config, dtype=_torch_type(config.training.precision))
    return RecordedWeights(
        model,
        make_optimizer(model, config),
        state_directories(config),
        precision=config.training.precision,
        states=config.engine.states,
        grain=checkpoint.grain,
        chunk_parameters=checkpoint.chunk_parameters,
        durability=config.engine.durability,
        unsafe_filesystems=config.engine.unsafe_filesystems,
    )


def recorded_checkpoint(config: RunConfig) -> Checkpoint:
    """The boundary that the run's states recorded last.

    Raises:
        ResumeError: there is none, it is damaged, or of another version of the program.
    """
    directories = state_directories(config)
    record = read_record(directories) if is_resumable(config) else None
    if record is None or PAYLOAD_KEY not in record.payload:
        raise ResumeError(
            "the run has recorded no step, or its states are gone",
            place=str(directories[0]),
            remedy="Export a run with durability step or snapshot that has done a step, while its states are kept.",
        )
    return Checkpoint.from_payload(record.payload)


def _torch_type(precision: Precision) -> torch.dtype:
    return torch.bfloat16 if precision is Precision.BF16 else torch.float32
