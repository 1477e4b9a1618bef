"""Turns rows into token ids and labels with a model folder's own tokenizer, through the `tokenizers` library alone.

The text is tokenised once, as a whole, and trained spans are mapped to tokens by their character offsets: a token is trained when it
overlaps a trained span. Behind the assistant's end-of-turn token nothing is trained (templates write a line break there).
Spellings of special tokens inside a message's content become the tokens of their plain text, so that data cannot close a turn.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import tokenizers

from lohan.data.chat import ChatTemplate, RenderedChat, render_chat, render_completion, render_plain_prompt, render_prompt
from lohan.data.formats import Row, RowFormat
from lohan.errors import DataError, ModelError

UNTRAINED = -100
"""Label of a token that is read but not trained, as in torch's cross entropy and transformers."""

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_MAX_SETTINGS_BYTES = 16 * 1024 * 1024
_MAX_TURN_TOKENS = 4096
"""Of a turn of one letter, with what a template writes around it."""


class SpecialTokens(StrEnum):
    """What becomes of them in a text."""

    SHOW = "show"
    LEAVE_OUT = "leave_out"


@dataclass(frozen=True, slots=True)
class TokenizedRow:
    """One row's tokens; both lists have the same length."""

    input_ids: list[int]
    labels: list[int]
    """The token's own id where it is trained, else `UNTRAINED`; the model shifts them itself."""
    cut_tokens: int = 0
    """How many tokens behind the sequence length were cut off."""

    @property
    def trained_tokens(self) -> int:
        """Tokens that count in the loss: the first token of a row is never predicted."""
        return sum(label != UNTRAINED for label in self.labels[1:])


class Tokenizer:
    """A model's tokenizer and chat template. Make one with `from_folder`."""

    def __init__(
        self, backend: tokenizers.Tokenizer, special_tokens: Mapping[str, str], template: ChatTemplate | None, *, place: str
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._around = _special_tokens_around(backend)
        # Post-processors may shorten offsets by white space (ByteLevel's trim_offsets), which would lose white space in trained spans.
        backend.post_processor = None
        self.place = place
        self.template = template
        self.special_tokens = dict(special_tokens)
        """`bos_token`, `eos_token` … as the model's files name them."""
        self._backend = backend
        added = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
        self._special_spellings = tuple(sorted(added | {token for token in special_tokens.values() if token}))
        self._special_ids = {backend.token_to_id(spelling) for spelling in self._special_spellings} - {None}
        self._literal_ids: dict[str, list[int]] = {}

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Read tokenizer.json, tokenizer_config.json, special_tokens_map.json and chat_template.jinja of a model folder.

        Raises:
            ModelError: tokenizer.json is missing or not usable, or the chat template is not.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelError("tokenizer.json is missing", place=str(folder), remedy="Put the model's tokenizer.json into its folder.")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for every fault of the file
            raise ModelError(f"not a usable tokenizer: {error}", place=str(path), remedy="Fetch the file again.") from error
        settings = _read_json(folder / "special_tokens_map.json") | _read_json(folder / "tokenizer_config.json")
        special_tokens = _special_tokens(settings)
        source, template_place = _template_source(folder, settings)
        template = ChatTemplate(source, special_tokens, place=template_place) if source is not None else None
        return cls(backend, special_tokens, template, place=str(folder))

    @property
    def vocabulary_size(self) -> int:
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def pad_id(self) -> int:
        """Fills rows up in a batch; it is masked by position, so any token will do."""
        for name in ("pad_token", "eos_token"):
            token = self._backend.token_to_id(self.special_tokens.get(name, ""))
            if token is not None:
                return token
        return 0

    def encode_row(self, row: Row, *, sequence_length: int) -> TokenizedRow:
        """Tokenise one row; tokens behind `sequence_length` are cut and counted.

        A prompt/completion row of a model without a chat template is the prompt, the completion and the end-of-text token, with
        whatever the tokenizer puts around every text; the completion and the end of text are trained.

        Raises:
            DataError: the template refuses the row, or no trained token is left within `sequence_length`.
            ModelError: the row is a conversation and the model has no chat template.
        """
        if self.template is not None:
            input_ids, labels = self._encode(render_chat(self.template, row.messages, self._special_spellings))
        elif row.format is RowFormat.PROMPT_COMPLETION:
            prompt, completion = (message["content"] for message in row.messages)
            before, after = self._around
            end_of_text = self.special_tokens.get("eos_token", "")
            chat = render_completion(prompt, completion, end_of_text=end_of_text, special_tokens=self._special_spellings)
            input_ids, labels = self._encode(chat)
            input_ids = [*before, *input_ids, *after]
            labels = [*[UNTRAINED] * len(before), *labels, *[UNTRAINED] * len(after)]
        else:
            raise ModelError(
                f"the model has no chat template, which rows in the {row.format} format need",
                place=self.place,
                remedy="Use prompt/completion rows, or put a chat_template.jinja into the model's folder.",
            )
        tokens = TokenizedRow(input_ids[:sequence_length], labels[:sequence_length], max(0, len(input_ids) - sequence_length))
        if not tokens.trained_tokens:
            reason = f"; the answer begins behind token {sequence_length}" if tokens.cut_tokens else ""
            raise DataError(f"no token of the row is trained{reason}", remedy="Raise training.sequence_length, or leave the row out.")
        return tokens

    def encode_prompt(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The tokens of a conversation (role and content of each message) that the model is to answer.

        They are those that `encode_row` puts before an answer that is trained. Without a chat template contents follow each other, see
        `render_plain_prompt`, behind whatever the tokenizer puts before every text.

        Raises:
            DataError: the template refuses the conversation.
        """
        if self.template is not None:
            return self._encode(render_prompt(self.template, messages, self._special_spellings))[0]
        end_of_text = self.special_tokens.get("eos_token", "")
        chat = render_plain_prompt(messages, end_of_text=end_of_text, special_tokens=self._special_spellings)
        return [*self._around[0], *self._encode(chat)[0]]

    def end_ids(self) -> set[int]:
        """Tokens that end an answer: the end of text, and the special token with which a trained turn of the template ends."""
        ends = {self._backend.token_to_id(self.special_tokens.get("eos_token", ""))} - {None}
        if self.template is not None:
            talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}]
            with suppress(DataError):  # a template that wants something else in a conversation says nothing about its turns' end
                row = self.encode_row(Row(1, talk), sequence_length=len(talk) * _MAX_TURN_TOKENS)
                last = next(label for label in reversed(row.labels) if label != UNTRAINED)
                ends |= {last} & self._special_ids
        return {token for token in ends if token is not None}

    def decode(self, ids: list[int], *, special: SpecialTokens = SpecialTokens.SHOW) -> str:
        """The text of `ids`."""
        return self._backend.decode(ids, skip_special_tokens=special is SpecialTokens.LEAVE_OUT)

    def _encode(self, chat: RenderedChat) -> tuple[list[int], list[int]]:
        encoding = self._backend.encode(chat.text, add_special_tokens=False)
        trained = [(start, self._end_of_turn(chat.text, start, end)) for start, end in chat.trained]
        trained_starts = [start for start, _ in trained]
        literal_starts = [start for start, _ in chat.literal]
        input_ids: list[int] = []
        labels: list[int] = []
        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            # The last span that begins before the token's end is the only one it can overlap: spans are in order and disjoint.
            at = bisect_left(trained_starts, end) - 1
            is_trained = end > start and at >= 0 and start < trained[at][1]
            # A special token may take white space around it in, so its spelling lies within its offsets rather than at them.
            is_literal = token in self._special_ids and bisect_left(literal_starts, start) < bisect_left(literal_starts, end)
            ids = self._literal(chat.text[start:end]) if is_literal else [token]
            input_ids += ids
            labels += ids if is_trained else [UNTRAINED] * len(ids)
        return input_ids, labels

    def _end_of_turn(self, text: str, start: int, end: int) -> int:
        """Where a trained span ends: behind its last special token when only white space follows that."""
        stripped = text[start:end].rstrip()
        return start + len(stripped) if stripped.endswith(self._special_spellings) else end

    def _literal(self, spelling: str) -> list[int]:
        """The tokens of a special token's spelling, read as plain text."""
        if spelling not in self._literal_ids:
            self._backend.encode_special_tokens = True
            try:
                self._literal_ids[spelling] = self._backend.encode(spelling, add_special_tokens=False).ids
            finally:
                self._backend.encode_special_tokens = False
        return self._literal_ids[spelling]


def _special_tokens_around(backend: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before and behind every text, such as a begin-of-text token."""
    bare = backend.encode("a", add_special_tokens=False).ids
    full = backend.encode("a", add_special_tokens=True).ids
    at = next((at for at in range(len(full) - len(bare) + 1) if full[at : at + len(bare)] == bare), 0)
    return full[:at], full[at + len(bare) :]


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in _SPECIAL_NAMES:
        token = settings.get(name)
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str):
            found[name] = content
    return found


def _template_source(folder: Path, settings: Mapping[str, Any]) -> tuple[str | None, str]:
    """The chat template and where it stands; the file of its own wins, as in transformers."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        if path.stat().st_size > _MAX_SETTINGS_BYTES:
            raise ModelError("the chat template is larger than 16 MiB", place=str(path), remedy="Fetch the file again.")
        try:
            return path.read_text(encoding="utf-8"), str(path)
        except UnicodeDecodeError as error:
            raise ModelError("the chat template is not UTF-8 text", place=str(path), remedy="Fetch the file again.") from error
    source = settings.get("chat_template")
    if isinstance(source, list):  # several named templates
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default")
    return source if isinstance(source, str) else None, str(folder / "tokenizer_config.json")


def _read_json(path: Path) -> dict[str, Any]:
    """A settings file's object; empty where there is no such file."""
    if not path.is_file():
        return {}
    try:
        if path.stat().st_size > _MAX_SETTINGS_BYTES:
            raise ValueError("it is larger than 16 MiB")
        value = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(value, dict):
            raise ValueError("it is not a JSON object")
    except (ValueError, RecursionError) as error:
        raise ModelError(f"not usable: {error}", place=str(path), remedy="Fetch the file again.") from error
    return value
