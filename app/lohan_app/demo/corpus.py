"""A real public dataset without a download: the English dialogs of the `chatterbot-corpus` package, as OpenAI messages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import yaml

from lohan.errors import DataError

PACKAGE = "chatterbot_corpus"
ROLES = ("user", "assistant")


def corpus_folder() -> Path:
    """Where the installed package keeps its English dialogs; the package's own code is not run.

    Raises:
        DataError: the package is not installed, or has no such folder.
    """
    found = find_spec(PACKAGE)
    for root in (found.submodule_search_locations or ()) if found else ():
        folder = Path(root) / "data" / "english"
        if folder.is_dir():
            return folder
    raise DataError("the sample dialogs are not installed", place="chatterbot-corpus", remedy="Run `make setup`.")


def dialogs(folder: Path) -> Iterator[list[dict[str, str]]]:
    """Conversations of every file, in the order of names; speakers alternate, and a last turn that nobody answers is left out."""
    for path in sorted(folder.glob("*.yml")):
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        for turns in content["conversations"]:
            texts = [str(turn).strip() for turn in turns]
            answered = texts[: len(texts) // 2 * 2]
            if answered and all(answered):
                yield [{"role": ROLES[index % 2], "content": text} for index, text in enumerate(answered)]


def write_dataset(path: Path) -> int:
    """Write every dialog as one JSONL row `{"messages": […]}`; returns the number of rows."""
    rows = list(dialogs(corpus_folder()))
    text = "".join(json.dumps({"messages": messages}, ensure_ascii=False) + "\n" for messages in rows)
    path.write_text(text, encoding="utf-8")
    return len(rows)
