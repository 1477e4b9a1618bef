"""`lohan chat`: a model folder answers one conversation."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lohan.cli.commands import CODE_OF, Attempt, ExitCode, job_errors_in_words, print_error
from lohan.data.conversation import Conversation, parse_conversation
from lohan.errors import ConfigError
from lohan.events import EventType, ExitReason, Phase

if TYPE_CHECKING:
    from lohan.training.job import Job
    from lohan.training.reporter import Listener, Reporter
    from lohan.training.stopping import StopWatch

ModelFolder = Annotated[Path, typer.Argument(metavar="FOLDER", help="A Hugging Face folder with safetensors, such as a run's export.")]
Messages = Annotated[
    Path,
    typer.Option(
        "--messages",
        metavar="FILE",
        help="A JSON list of messages, an object with messages and settings, or plain text: one question. - reads from stdin.",
    ),
]
MaxNewTokens = Annotated[int | None, typer.Option("--max-new-tokens", help="Tokens of the answer at most (512).")]
Temperature = Annotated[float | None, typer.Option(help="0 takes the likeliest token each time (0.7).")]
TopP = Annotated[float | None, typer.Option("--top-p", help="Draw from the likeliest tokens that add up to this probability (0.9).")]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same answer. Unset: another one each time.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or a GPU's UUID.")]
GpuMemory = Annotated[int | None, typer.Option("--gpu-memory-bytes", min=1, help="Of the GPU at most. Unset: what there is.")]
JobFolder = Annotated[
    Path | None,
    typer.Option(
        "--job",
        metavar="FOLDER",
        help="Print nothing: FOLDER/events.jsonl has the answer as it grows, with lock and requests of lohan train.",
    ),
]
STDIN = Path("-")
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def chat(
    folder: ModelFolder,
    messages: Messages = STDIN,
    max_new_tokens: MaxNewTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Seed = None,
    device: Device = "auto",
    gpu_memory_bytes: GpuMemory = None,
    job: JobFolder = None,
    attempt: Attempt = None,
) -> None:
    """Answer a conversation with a model: the text comes as it is written. Nothing is kept of it."""
    settings = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    try:
        conversation = _read(messages, {name: value for name, value in settings.items() if value is not None})
    except ConfigError as error:
        print_error(error)
        raise typer.Exit(ExitCode.BAD_CONFIG) from None

    def work(place: Path, listener: Listener | None) -> ExitReason:
        with job_errors_in_words(place):
            return _carry_out(folder.absolute(), conversation, place, attempt, listener, device=device, gpu_memory_bytes=gpu_memory_bytes)

    if job is not None:
        reason = work(job.absolute(), None)
    else:
        with TemporaryDirectory(prefix="lohan-chat-") as place:
            reason = work(Path(place), _Show().event)
    raise typer.Exit(CODE_OF[reason])


def _read(path: Path, overrides: dict[str, Any]) -> Conversation:
    place = "stdin" if path == STDIN else str(path)
    try:
        content = sys.stdin.buffer.read() if path == STDIN else path.read_bytes()
        return parse_conversation(content.decode(), place=place, overrides=overrides)
    except UnicodeDecodeError as error:
        raise ConfigError("not UTF-8 text", place=place, remedy="Save it as UTF-8.") from error
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", place=place, remedy="Name a file, or - for stdin.") from error


def _carry_out(
    folder: Path,
    conversation: Conversation,
    place: Path,
    attempt: int | None,
    listener: Listener | None,
    *,
    device: str,
    gpu_memory_bytes: int | None,
) -> ExitReason:
    from lohan.training.job import carry_out

    def begin(reporter: Reporter, stop: StopWatch) -> Job:
        from lohan.training.answering import ChatJob

        return ChatJob(folder, conversation, reporter, stop, device=device, gpu_memory_bytes=gpu_memory_bytes)

    return carry_out(
        place,
        begin,
        phase=Phase.LOADING_MODEL,
        attempt=attempt,
        listener=listener,
        memory_remedy="Ask for fewer tokens, or leave out the earliest messages",
    )


class _Show:
    """The answer on stdout as it comes; everything else on stderr, so that the answer alone can go into a file."""

    def __init__(self) -> None:
        self._shown = 0

    def event(self, type: EventType, fields: dict[str, Any]) -> None:
        match type:
            case EventType.ANSWER_PART:
                self._write(fields["text"])
            case EventType.ANSWER:
                self._write(fields["text"][self._shown :])
                self._write("\n")
                speed = f", {fields['tokens_per_second']:.1f} tokens/s" if fields["tokens_per_second"] is not None else ""
                why = str(fields["finish_reason"]).replace("_", " ")
                self._note(f"{fields['prompt_tokens']} tokens read, {fields['answer_tokens']} written{speed}; {why}")
            case EventType.EXIT if fields["error"] is not None:
                error = fields["error"]
                where = f"{error['place']}: " if error["place"] else ""
                self._note(f"lohan: {where}{error['message']}" + (f"\n  {error['remedy']}" if error["remedy"] else ""))

    def _write(self, text: str) -> None:
        self._shown += len(text)
        # A model may write whatever it likes; a terminal would obey control sequences.
        sys.stdout.write(_CONTROLS.sub("\ufffd", text) if sys.stdout.isatty() else text)
        sys.stdout.flush()

    @staticmethod
    def _note(text: str) -> None:
        print(text, file=sys.stderr)
