"""Answers a conversation with a model folder, and tells the text as it grows."""

from __future__ import annotations

import json
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from lohan.data.prompt import Prompt, read_prompt
from lohan.data.tokenize import SpecialTokens, Tokenizer
from lohan.errors import CapacityError, DataError, EngineError, ModelError
from lohan.events import EventType, ExitReason, FinishReason, Phase
from lohan.models.filled import filled_model
from lohan.models.load import load_config, open_weights
from lohan.planning.answer_memory import PREFILL_TOKENS
from lohan.planning.footprint import GPU_RESERVE_BYTES
from lohan.streaming.device import resolve_device
from lohan.training.setup import ReportedWeights
from lohan.units import format_bytes

if TYPE_CHECKING:
    from lohan.data.conversation import Conversation
    from lohan.training.reporter import Reporter
    from lohan.training.stopping import StopWatch

FLUSH_SECONDS = 0.2
"""Between two pieces of an answer: what a reader takes for flowing, however fast tokens come, and few rows in a database."""
MAX_SEED = 2**32
_UNFINISHED = "\ufffd"
"""What tokens decode to that end in the middle of a character."""


class ChatJob:
    """Reads a model folder and a conversation, and says the answer in events. Nothing is written besides.

    Args:
        folder: a Hugging Face folder with safetensors; its code, if it has any, is never run.
        device: as in `lohan.config.EngineSection`.
        gpu_memory_bytes: of the GPU at most, CUDA's own included; None takes what there is.
    """

    def __init__(
        self,
        folder: Path,
        conversation: Conversation,
        reporter: Reporter,
        stop: StopWatch,
        *,
        device: str,
        gpu_memory_bytes: int | None,
    ) -> None:
        self._folder, self._conversation, self._reporter, self._stop = folder, conversation, reporter, stop
        self._device_name, self._gpu_memory_bytes = device, gpu_memory_bytes

    def tidy(self, reason: ExitReason) -> None:
        """Nothing: there are no files."""

    def execute(self) -> None:
        """Do it.

        Raises:
            ModelError: the folder cannot be used as a model, or its template never ends.
            DataError: the template refuses the conversation, or the model's context has no room for an answer to it.
            CapacityError: the GPU has less than was reserved on it.
            StopRequested: it was asked to stop. What was said so far is told as an answer where it was cancelled.
        """
        prompt = read_prompt(self._folder, self._conversation.plain_messages)
        self._stop.check()
        config = load_config(self._folder)
        most = self._room(len(prompt.ids), _context(config))
        _check_vocabulary(prompt, config)
        device = resolve_device(self._device_name)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._bound(device)
        precision = "bf16" if dtype is torch.bfloat16 else "fp32"
        self._reporter.say(EventType.STARTED, device=str(device), precision=precision, total_steps=0, resumed_step=0)
        self._reporter.begin(Phase.LOADING_MODEL, "Loading the model.")
        with open_weights(self._folder) as opened:
            model = filled_model(config, ReportedWeights(opened, self._reporter, self._stop), device=device, dtype=dtype)
        self._reporter.begin(Phase.ANSWERING, f"Reading {len(prompt.ids):,} tokens of conversation, and answering.", 0.0)
        self._answer(model, prompt, most, device)

    def _room(self, prompt_tokens: int, context: int) -> int:
        """Tokens that the answer may have."""
        if not prompt_tokens:
            raise DataError("the conversation has no token", place="messages", remedy="Say something.")
        if prompt_tokens >= context:
            raise DataError(
                f"the conversation has {prompt_tokens:,} tokens, and the model reads {context:,} with its answer",
                place="messages",
                remedy="Leave out the earliest messages, or begin a new chat.",
            )
        return min(self._conversation.max_new_tokens, context - prompt_tokens)

    def _bound(self, device: torch.device) -> None:
        """Let torch take no more of a GPU than was reserved: what others have reserved there is theirs."""
        if device.type != "cuda" or self._gpu_memory_bytes is None:
            return
        total = torch.cuda.get_device_properties(device).total_memory
        if self._gpu_memory_bytes > total:
            raise CapacityError(
                f"{format_bytes(self._gpu_memory_bytes)} are reserved on a GPU of {format_bytes(total)}",
                need_bytes=self._gpu_memory_bytes,
                have_bytes=total,
                place=str(device),
                remedy="Ask for fewer tokens, or on another device.",
            )
        # Half of the reserve is CUDA's context, which torch does not allocate.
        torch.cuda.set_per_process_memory_fraction(max(0, self._gpu_memory_bytes - GPU_RESERVE_BYTES // 2) / total, device)

    def _answer(self, model: Any, prompt: Prompt, most: int, device: torch.device) -> None:
        conversation = self._conversation
        tokenizer = Tokenizer.from_folder(self._folder)
        ends = prompt.end_ids | _end_ids(self._folder)
        is_drawn = conversation.temperature > 0
        seed = conversation.seed if conversation.seed is not None else secrets.randbelow(MAX_SEED)
        torch.manual_seed(seed)
        telling = _Telling(tokenizer, self._reporter, self._stop, ends=ends, most=most)
        generate(model, prompt.ids, conversation, telling, ends=ends, most=most, pad_id=tokenizer.pad_id, device=device)
        reason = telling.finish_reason
        if reason is None:
            self._stop.check()
            raise EngineError("the answer ended, and nothing says why", remedy="This is a fault of the program: keep the log.")
        telling.conclude(reason, prompt_tokens=len(prompt.ids), seed=seed if is_drawn else None)
        if reason is FinishReason.CANCELLED:
            self._stop.check()


class _Telling(StoppingCriteria):
    """Takes tokens as they come, tells their text every `FLUSH_SECONDS`, and ends the generation where somebody asks for that."""

    def __init__(self, tokenizer: Tokenizer, reporter: Reporter, stop: StopWatch, *, ends: frozenset[int], most: int) -> None:
        self._tokenizer, self._reporter, self._stop, self._ends, self._most = tokenizer, reporter, stop, ends, most
        self._ids: list[int] = []
        self._told = ""
        self._began_at = self._flushed_at = time.monotonic()
        self._first_at: float | None = None
        self._last_at = self._began_at
        self._is_asked = False

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        moment = self._last_at = time.monotonic()
        self._ids.append(int(input_ids[0, -1]))
        self._first_at = self._first_at or moment
        if moment - self._flushed_at >= FLUSH_SECONDS:
            self._flushed_at = moment
            self._is_asked = self._stop.is_asked
            self._tell()
        return torch.full((1,), self._is_asked, dtype=torch.bool, device=input_ids.device)

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended; None where the host stops, or somebody wants it to be begun anew later: that is no end of an answer."""
        if self._ids and self._ids[-1] in self._ends:
            return FinishReason.END_OF_TEXT
        if len(self._ids) >= self._most:
            return FinishReason.LENGTH
        return FinishReason.CANCELLED if self._stop.is_cancelled else None

    def conclude(self, reason: FinishReason, *, prompt_tokens: int, seed: int | None) -> None:
        """Tell the whole answer."""
        first_at, count = self._first_at, len(self._ids)
        later = self._last_at - first_at if first_at is not None else 0.0
        self._reporter.say(
            EventType.ANSWER,
            text=self._text(),
            finish_reason=str(reason),
            prompt_tokens=prompt_tokens,
            answer_tokens=count,
            seconds=self._last_at - self._began_at,
            first_token_seconds=first_at - self._began_at if first_at is not None else None,
            tokens_per_second=(count - 1) / later if count > 1 and later > 0 else None,
            seed=seed,
        )

    def _tell(self) -> None:
        """What of the text is new and stays: a character may need the next token, and a decoder may change its mind about white space."""
        text = self._text().rstrip(_UNFINISHED)
        if len(text) > len(self._told) and text.startswith(self._told):
            new, self._told = text[len(self._told) :], text
            self._reporter.say(EventType.ANSWER_PART, text=new, tokens=len(self._ids), progress=len(self._ids) / self._most)

    def _text(self) -> str:
        # NUL is the one character that PostgreSQL does not store; a model may well say it.
        return self._tokenizer.decode(self._ids, special=SpecialTokens.LEAVE_OUT).replace("\0", _UNFINISHED)


def generate(
    model: Any,
    prompt_ids: list[int],
    conversation: Conversation,
    criterion: StoppingCriteria,
    *,
    ends: frozenset[int],
    most: int,
    pad_id: int,
    device: torch.device,
) -> None:
    """transformers' own generation with these settings and none of the model's; `criterion` is asked after every token.

    Args:
        ends: tokens behind which it ends.
        most: tokens of the answer.
    """
    settings: dict[str, Any] = {"do_sample": False}
    if conversation.temperature > 0:
        settings = {"do_sample": True, "temperature": conversation.temperature, "top_p": conversation.top_p, "top_k": 0}
    make: Any = GenerationConfig
    wanted = make(
        **settings,
        max_new_tokens=most,
        eos_token_id=sorted(ends) or None,
        pad_token_id=pad_id,
        use_cache=True,
        prefill_chunk_size=PREFILL_TOKENS if len(prompt_ids) > PREFILL_TOKENS else None,  # not every model's cache can be filled in parts
    )
    # What the folder's generation_config.json says would fill in whatever is not set.
    model.generation_config = wanted
    ids = torch.tensor([prompt_ids], device=device)
    with torch.inference_mode():
        model.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=wanted, stopping_criteria=StoppingCriteriaList([criterion])
        )


def _check_vocabulary(prompt: Prompt, config: Any) -> None:
    vocabulary = config.get_text_config().vocab_size
    if max(prompt.ids) >= vocabulary:
        raise ModelError(
            f"the tokenizer gives token {max(prompt.ids)}, and the model knows {vocabulary}",
            place="tokenizer.json",
            remedy="Use the tokenizer that belongs to the model.",
        )


def _context(config: Any) -> int:
    """Tokens that the model reads at most."""
    text = config.get_text_config()
    found = next((getattr(text, name) for name in ("max_position_embeddings", "n_positions") if getattr(text, name, None)), None)
    if not isinstance(found, int):
        raise ModelError("its configuration says no length of context", place=str(config.model_type), remedy="Use another model.")
    return found


def _end_ids(folder: Path) -> frozenset[int]:
    """Tokens that end an answer by the folder's generation_config.json; none where it says nothing that can be used."""
    try:
        found = json.loads((folder / "generation_config.json").read_bytes()[:1_000_000]).get("eos_token_id")
    except (OSError, ValueError, AttributeError, RecursionError):
        return frozenset()
    listed = found if isinstance(found, list) else [found]
    return frozenset(token for token in listed if isinstance(token, int) and not isinstance(token, bool) and token >= 0)
