"""What a run is made of before its first step: rows, weights, optimizer."""

from __future__ import annotations

import contextlib
import fcntl
import math
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lohan.config import RunConfig
from lohan.data.pack import TokenRows
from lohan.data.prepare import prepare_tokens
from lohan.data.tokenize import Tokenizer
from lohan.errors import DataError
from lohan.events import Phase
from lohan.models.tokenizer_files import write_tokenizer
from lohan.models.weights import WeightSource
from lohan.states.record import FOLDER as STATES
from lohan.states.record import RECORD_FILE
from lohan.training.reporter import Reporter
from lohan.training.stopping import StopWatch

if TYPE_CHECKING:
    from torch import nn

TOKENS_FILE, TOKENIZER_FOLDER = "tokens.safetensors", "tokenizer"


def prepare_rows(config: RunConfig, model_config: Any, reporter: Reporter, stop: StopWatch) -> TokenRows:
    """The run's rows: its token file, or its JSONL file tokenised into `<run>/tokens.safetensors`.

    Raises:
        DataError: rows cannot be used, are longer than the sequence length, or have tokens that the model does not know.
        ModelError: the model has no usable tokenizer or chat template.
        StopRequested: a stop was asked for meanwhile.
    """
    reporter.begin(Phase.PREPARING_DATA, f"Reading {config.data.path.name}.")
    path = config.data.path
    if path.suffix != ".safetensors":
        path = config.output.directory / TOKENS_FILE
        _tokenise(config, path, reporter, stop)
    rows = TokenRows(path)
    vocabulary = model_config.get_text_config().vocab_size
    if rows.longest > config.training.sequence_length:
        raise DataError(
            f"a row has {rows.longest} tokens, above training.sequence_length {config.training.sequence_length}",
            place=path.name,
            remedy="Prepare the data again, or raise training.sequence_length.",
        )
    if rows.largest_id >= vocabulary:
        raise DataError(
            f"token {rows.largest_id} is not in the model's vocabulary of {vocabulary}",
            place=path.name,
            remedy="Prepare the data again with this model's tokenizer.",
        )
    return rows


def _tokenise(config: RunConfig, target: Path, reporter: Reporter, stop: StopWatch) -> None:
    tokenizer_folder = config.output.directory / TOKENIZER_FOLDER
    write_tokenizer(config.model.path, tokenizer_folder)

    def progress(_rows_done: int) -> None:
        stop.check()
        reporter.progress(None)

    prepared = prepare_tokens(
        config.data.path,
        Tokenizer.from_folder(tokenizer_folder),
        target,
        sequence_length=config.training.sequence_length,
        skip_bad_rows=config.data.skip_bad_rows,
        progress=progress,
    )
    if prepared.bad_rows:
        reporter.warn(f"{prepared.bad_rows} of {prepared.bad_rows + prepared.rows} rows cannot be used and were left out.")
    if prepared.cut_rows:
        reporter.warn(
            f"{prepared.cut_rows} of {prepared.rows} rows are longer than {config.training.sequence_length} tokens;"
            f" {prepared.cut_tokens} tokens were cut off.",
            "Raise training.sequence_length to train on them whole.",
        )


def make_optimizer(model: nn.Module, config: RunConfig) -> torch.optim.AdamW:
    """AdamW over all parameters; weight decay leaves one-dimensional ones (norms, biases) out."""
    training = config.training
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in parameters if parameter.dim() > 1], "weight_decay": training.weight_decay},
        {"params": [parameter for parameter in parameters if parameter.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=training.learning_rate,
        betas=(training.beta1, training.beta2),
        eps=training.epsilon,
    )


def remove_states(directories: Sequence[Path]) -> None:
    """Remove the states that an attempt left, where nothing goes on from them: they are up to 24 bytes a parameter.

    A directory that another run has locked is left alone.
    """
    with contextlib.ExitStack() as locks:
        ours = []
        for folder in (directory / STATES for directory in directories):
            with contextlib.suppress(OSError):
                lock = locks.enter_context((folder / "lock").open("ab"))
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                ours.append(folder)
        # The record first: without it the rest is nothing, however far the removal comes.
        for folder in ours:
            (folder / RECORD_FILE).unlink(missing_ok=True)
        for folder in ours:
            shutil.rmtree(folder, ignore_errors=True)


class ReportedWeights(WeightSource):
    """Passes a weight source on, reporting how much has been read, and stopping where that is asked for."""

    def __init__(self, source: WeightSource, reporter: Reporter, stop: StopWatch) -> None:
        self._source, self._reporter, self._stop = source, reporter, stop
        self.place = source.place
        self._read = 0
        self._elements = max(1, sum(math.prod(source.shape(name)) for name in source.names))

    @property
    def names(self) -> tuple[str, ...]:
        return self._source.names

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        return self._source.dtype(name)

    def read(self, name: str) -> torch.Tensor:
        self._report(math.prod(self.shape(name)))
        return self._source.read(name)

    def read_stretch(self, name: str, start: int, stop: int) -> torch.Tensor:
        self._report(stop - start)
        return self._source.read_stretch(name, start, stop)

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, self.read(name)) for name in self.names)

    def close(self) -> None:
        self._source.close()

    def _report(self, elements: int) -> None:
        self._stop.check()
        self._read += elements
        self._reporter.progress(min(1.0, self._read / self._elements))
