"""Makes tokens of a conversation in a limited child process: templates come with models from anywhere, and may never end.

python -m lohan.data.prompt FOLDER    the messages as a JSON list on stdin, tokens or an error as JSON on stdout
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lohan.data.tokenize import Tokenizer
from lohan.errors import DataError, LohanError, ModelError
from lohan.units import GIB

CPU_SECONDS = 20
MEMORY_BYTES = 4 * GIB
"""Address space: Python, a tokenizer of a quarter of a million tokens, and the text."""
_WALL_SECONDS = 300
"""On a machine that is busy with something else."""
_REMEDY = "Change the order or the roles of the messages, or begin a new chat."


@dataclass(frozen=True, slots=True)
class Prompt:
    """A conversation as the model reads it."""

    ids: list[int]
    end_ids: frozenset[int]
    """Tokens that end the answer, as far as the tokenizer knows them."""


def read_prompt(folder: Path, messages: Sequence[Mapping[str, str]], *, cpu_seconds: int = CPU_SECONDS) -> Prompt:
    """The tokens of `messages` for the model in `folder`.

    Raises:
        ModelError: its tokenizer or chat template cannot be used, or take more than `cpu_seconds` or `MEMORY_BYTES`.
        DataError: its chat template refuses the conversation.
    """
    command = [sys.executable, "-P", "-m", "lohan.data.prompt", str(folder), str(cpu_seconds)]
    try:
        done = subprocess.run(command, input=json.dumps(messages).encode(), capture_output=True, timeout=_WALL_SECONDS, check=False)
        reply = json.loads(done.stdout) if done.returncode == 0 else None
    except (subprocess.TimeoutExpired, ValueError):
        reply = None
    if not isinstance(reply, dict):
        raise ModelError(
            f"the model's tokenizer or chat template took more than {cpu_seconds} s of a processor or {MEMORY_BYTES // GIB} GiB of memory",
            place=str(folder),
            remedy="Correct the chat template in the model's folder, or use another model.",
        )
    if "error" in reply:
        error = reply["error"]
        if error["kind"] == DataError.__name__:
            raise DataError(error["message"], place="messages", remedy=_REMEDY)
        raise ModelError(error["message"], place=error["place"], remedy=error["remedy"])
    return Prompt([int(token) for token in reply["ids"]], frozenset(int(token) for token in reply["end_ids"]))


def _answer(folder: Path, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    try:
        tokenizer = Tokenizer.from_folder(folder)
        return {"ids": tokenizer.encode_prompt(messages), "end_ids": sorted(tokenizer.end_ids())}
    except LohanError as error:
        return {"error": error.to_dict()}


def main() -> None:
    """The child."""
    folder, cpu_seconds = Path(sys.argv[1]), int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print(json.dumps(_answer(folder, json.loads(sys.stdin.buffer.read()))))


if __name__ == "__main__":
    main()
