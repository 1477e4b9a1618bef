"""From a JSONL file to a token file: the one way in which rows become training data, for the command line and the service alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from lohan.data.formats import Row, RowError, iterate_rows
from lohan.data.lines import excerpt
from lohan.data.pack import TokenFileWriter
from lohan.data.tokenize import TokenizedRow, Tokenizer
from lohan.errors import DataError

_NAMED_ROWS = 5
_PROGRESS_ROWS = 256


@dataclass(frozen=True, slots=True)
class Prepared:
    """What became of the rows."""

    rows: int
    """Usable rows, in the token file."""
    bad_rows: int
    """Rows that were left out."""
    tokens: int
    trained_tokens: int
    longest_row_tokens: int
    cut_rows: int
    """Rows that were longer than the sequence length."""
    cut_tokens: int
    """Tokens of theirs behind it."""


def prepare_tokens(
    data: Path,
    tokenizer: Tokenizer,
    target: Path,
    *,
    sequence_length: int,
    skip_bad_rows: bool = False,
    progress: Callable[[int], None] = lambda _rows: None,
) -> Prepared:
    """Tokenise the rows of `data` into the token file `target`; `progress` is told the rows done, now and then.

    Raises:
        DataError: the file cannot be read, rows cannot be used and `skip_bad_rows` is off (the first are listed by line), or none can.
        ModelError: the model has no chat template and the rows need one.
    """
    rows = bad_rows = tokens = trained_tokens = longest = cut_rows = cut_tokens = 0
    named: list[RowError] = []
    with TokenFileWriter(target) as writer:
        for done, result in enumerate(tokenize_rows(data, tokenizer, sequence_length=sequence_length)):
            if done % _PROGRESS_ROWS == 0:
                progress(done)
            if isinstance(result, RowError):
                bad_rows += 1
                if len(named) < _NAMED_ROWS:
                    named.append(result)
                continue
            writer.add(result)
            rows += 1
            tokens += len(result.input_ids)
            trained_tokens += result.trained_tokens
            longest = max(longest, len(result.input_ids))
            cut_rows += result.cut_tokens > 0
            cut_tokens += result.cut_tokens
        if bad_rows and (rows == 0 or not skip_bad_rows):
            raise _unusable(data, named, bad_rows, bad_rows + rows)
        prepared = Prepared(rows, bad_rows, tokens, trained_tokens, longest, cut_rows, cut_tokens)
        settings = {"pad_id": tokenizer.pad_id, "sequence_length": sequence_length, **asdict(prepared)}
        writer.describe({name: str(value) for name, value in settings.items()})
    return prepared


def tokenize_rows(data: Path, tokenizer: Tokenizer, *, sequence_length: int) -> Iterator[TokenizedRow | RowError]:
    """Yield each row of `data` tokenised, or why it cannot be used."""
    for row in iterate_rows(data):
        yield row if isinstance(row, RowError) else _tokenize(row, tokenizer, sequence_length)


def _tokenize(row: Row, tokenizer: Tokenizer, sequence_length: int) -> TokenizedRow | RowError:
    try:
        return tokenizer.encode_row(row, sequence_length=sequence_length)
    except DataError as error:
        return RowError(row.line, f"{error.message}. {error.remedy}", excerpt(row.messages[0]["content"]))


def _unusable(data: Path, named: list[RowError], bad_rows: int, all_rows: int) -> DataError:
    listed = "; ".join(f"line {error.line}: {error.message}" for error in named)
    more = f"; and {bad_rows - len(named)} more" if bad_rows > len(named) else ""
    remedy = (
        "Correct these rows." if bad_rows == all_rows else "Correct these rows, or set data.skip_bad_rows = true to train without them."
    )
    return DataError(f"{bad_rows} of {all_rows} rows cannot be used: {listed}{more}.", place=data.name, remedy=remedy)
