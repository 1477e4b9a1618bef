"""Chats with what a run has as its result: each answer is a run of its own, with the device and the memory that it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from sqlalchemy.orm import Session

from lohan.data.conversation import Conversation, Role
from lohan.errors import CapacityError
from lohan.planning.answer_memory import AnswerMemory, AnswerShape, answer_memory, most_tokens, read_config, shape_of
from lohan.planning.fit import RAM_RESERVE_BYTES
from lohan.planning.workload import Workload
from lohan.units import format_bytes
from lohan_app.auth.schemas import Identity
from lohan_app.context import AppContext
from lohan_app.db import read_transaction
from lohan_app.entities import BaseModel, Run, RunKind, RunState
from lohan_app.errors import Conflict, NotFound, Unprocessable
from lohan_app.hardware.service import usable
from lohan_app.paging import DEFAULT_LIMIT, Page, make_page
from lohan_app.runs import queries, repository, service
from lohan_app.runs.kinds import Needs, settings_of
from lohan_app.runs.once import Answer, queue_once
from lohan_app.runs.planning import CPU_DEVICES, check_device
from lohan_app.runs.schemas import ChatRequest, RunDetail, RunView, view_of
from lohan_app.worker.reservations import suitable_devices

ASKABLE = frozenset({RunKind.TRAIN, RunKind.EXPORT})
"""Kinds whose result is a model."""
CONVERSATIONS_SHOWN = 50
CHAT = str(RunKind.CHAT)
"""Key in `Run.settings`: the fields of `ChatRequest`, `messages` with those of the chat that it follows."""


@dataclass(frozen=True, slots=True)
class Talk:
    """A conversation in the list: its last chat stands for all of it."""

    id: str
    first_words: str
    questions: int
    state: RunState


def submit_chat(context: AppContext, identity: Identity, run_id: str, request: ChatRequest, idempotency_key: str | None = None) -> Answer:
    """Queue a conversation for the model that the run has as its result; it belongs to whoever asks.

    Raises:
        NotFound: there is no such run, or no such chat to follow, that this user may see.
        Conflict: the run has no result to ask; the remedy says how it gets one. Or the chat to follow has no whole answer.
        CapacityError: no device of the machine has, all free, the memory that it takes.
        Unprocessable: runs may not use such a device, or the conversation is too long with what it follows; or the idempotency key is
            malformed, or was used for another request.
        ModelError: the result's config.json does not say what an answer takes.
    """

    def make(session: Session) -> Run:
        service.visible(session, identity, run_id)
        source = repository.lock_run(session, run_id)  # held, so that it cannot be deleted before the chat is there to need it
        _check_source(context, source)
        assert source is not None, "it was checked"
        conversation = _whole(session, identity, source, request)
        asked = conversation.model_dump(mode="json") | {"device": request.device, "follows": request.follows}
        return Run(
            kind=RunKind.CHAT,
            owner_id=identity.user_id,
            parent_id=source.id,
            name=f"Chat with {source.name}",  # other users see it in the queue: no word of the conversation
            base_model_id=source.base_model_id,
            settings=settings_of(RunKind.CHAT, asked, _needs(session, context, source, conversation, request.device)),
        )

    return queue_once(context, identity, f"chat {run_id} {request.model_dump_json()}", idempotency_key, make, action="run.chat")


def list_chats(context: AppContext, identity: Identity, run_id: str, after: str | None = None, limit: int = DEFAULT_LIMIT) -> Page[RunView]:
    """Chats with the run that this user may see, newest first; raises NotFound where there is no such run."""
    with read_transaction(context.engine) as session:
        service.visible(session, identity, run_id)
        rows = queries.list_runs(
            session, owner_id=_seen_by(identity), states=None, after=after, limit=limit + 1, kind=RunKind.CHAT, parent_id=run_id
        )
    return make_page(rows, limit, view_of, lambda row: row.run.id)


def talks(context: AppContext, identity: Identity, run_id: str) -> list[Talk]:
    """The latest conversations with the run that this user may see, newest first: of chats that follow each other the last."""
    with read_transaction(context.engine) as session:
        service.visible(session, identity, run_id)
        found = queries.chats_of(session, run_id, owner_id=_seen_by(identity), limit=CONVERSATIONS_SHOWN)
    asked = {run.id: run.settings.get(CHAT, {}) for run in found}
    followed = {settings.get("follows") for settings in asked.values()}
    return [_talk(run, asked[run.id]) for run in found if run.id not in followed]


def find_chat(context: AppContext, identity: Identity, run_id: str, chat_id: str) -> RunDetail | None:
    """The chat with the run; None where there is none that this user may see: it may have been deleted since the page was opened."""
    with read_transaction(context.engine) as session:
        named = queries.named_run(session, chat_id)
        if named is None or named.run.kind is not RunKind.CHAT or named.run.parent_id != run_id:
            return None
        return service.detail(session, named) if identity.may_see(named.run.owner_id) else None


def can_be_asked(context: AppContext, run: RunDetail) -> bool:
    """Whether the run's page offers it: a look at a folder."""
    return run.kind in ASKABLE and run.state is RunState.SUCCEEDED and (context.settings.run_folder(run.id) / "export").is_dir()


def check_again(session: Session, context: AppContext, run: Run) -> None:
    """See that what a chat asked is still there to be asked once more; raises Conflict."""
    _check_source(context, repository.lock_run(session, run.parent_id) if run.parent_id is not None else None)
    if CHAT not in run.settings:
        raise Conflict("what was said in the chat is gone", place=run.id, remedy="Begin a new chat.")


def _seen_by(identity: Identity) -> str | None:
    return None if identity.is_admin else identity.user_id


def _talk(run: Run, settings: dict[str, Any]) -> Talk:
    said = [str(message.get("content", "")) for message in settings.get("messages", ()) if message.get("role") == Role.USER]
    return Talk(run.id, said[0] if said else "", len(said), run.state)


def _check_source(context: AppContext, run: Run | None) -> None:
    if run is None or run.deleted_at is not None:
        raise Conflict("the run whose model is to answer is gone", remedy="Restore it from the trash, or chat with another run.")
    if run.kind not in ASKABLE:
        remedy = "Chat with the run that it asks." if run.kind is RunKind.CHAT else "Chat with a training run that has succeeded."
        raise Conflict(f"a run of kind {run.kind} has no model that could answer", place=run.id, remedy=remedy)
    if run.state is not RunState.SUCCEEDED:
        rest = run.kind is RunKind.TRAIN and run.state in (RunState.PAUSED, RunState.FAILED, RunState.CANCELLED)
        raise Conflict(
            f"the run is {run.state}, and has no model that could answer yet",
            place=run.id,
            remedy="Export what it has recorded (POST …/exports), and chat with that export." if rest else "Wait until it has succeeded.",
        )
    if not (context.settings.run_folder(run.id) / "export").is_dir():
        raise Conflict("the run's result is no longer on the disk", place=run.id, remedy="Run it again.")


def _whole(session: Session, identity: Identity, source: Run, request: ChatRequest) -> Conversation:
    """The conversation with what it follows."""
    values = request.model_dump(mode="json", exclude={"device", "follows"})
    if request.follows is not None:
        values["messages"] = [*_said(session, identity, source, request.follows), *values["messages"]]
    try:
        return Conversation.model_validate(values)
    except ValidationError as error:
        fault = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise Unprocessable(f"with what it follows: {fault}", place="messages", remedy="Begin a new chat.") from None


def _said(session: Session, identity: Identity, source: Run, chat_id: str) -> list[dict[str, Any]]:
    """The messages of a chat, and its answer."""
    before = queries.named_run(session, chat_id)
    run = before.run if before is not None else None
    if run is None or run.kind is not RunKind.CHAT or run.parent_id != source.id or not identity.may_see(run.owner_id):
        raise NotFound("no such chat with this run", place="follows", remedy="Look at the list of its chats, or begin a new one.")
    answer = queries.answer_of(session, chat_id)
    if run.state is not RunState.SUCCEEDED or answer is None or not answer["text"]:
        state = "was answered with no word" if run.state is RunState.SUCCEEDED else f"is {run.state}"
        raise Conflict(f"the chat to follow {state}", place="follows", remedy="Wait for its answer, or begin a new chat.")
    return [*run.settings[CHAT]["messages"], {"role": Role.ASSISTANT, "content": answer["text"]}]


def _needs(session: Session, context: AppContext, source: Run, conversation: Conversation, device: str) -> Needs:
    facts = usable(context.hardware.facts(), context.settings)
    check_device(device, facts, context.settings, place="device")
    shape = _shape(session, context, source)
    tokens = most_tokens(
        shape,
        size_bytes=conversation.size_bytes,
        messages=len(conversation.messages),
        max_new_tokens=conversation.max_new_tokens,
    )
    gpus = {gpu.uuid: gpu.total_bytes for gpu in facts.gpus}
    suitable = suitable_devices(context.settings.devices or tuple(gpus) or CPU_DEVICES, device)
    largest_gpu = max((gpus[name] for name in suitable if name in gpus), default=0)
    ram = max(0, facts.ram.total_bytes - RAM_RESERVE_BYTES)
    on_gpu, on_cpu = answer_memory(shape, tokens, on_gpu=True), answer_memory(shape, tokens, on_gpu=False)
    if on_gpu.gpu_bytes <= largest_gpu and on_gpu.ram_bytes <= ram:
        return Needs("cuda" if device == "auto" else device, on_gpu.ram_bytes, on_gpu.gpu_bytes)
    if any(name.startswith("cpu") for name in suitable) and on_cpu.ram_bytes <= ram:
        return Needs("cpu" if device == "auto" else device, on_cpu.ram_bytes)
    raise _too_large(suitable, on_gpu, on_cpu, largest_gpu, ram, tokens)


def _shape(session: Session, context: AppContext, source: Run) -> AnswerShape:
    """The model's sizes: of its base model, which may have been deleted since, and of the result's own config.json."""
    model = session.get(BaseModel, source.base_model_id) if source.base_model_id is not None else None
    if model is None or model.workload is None:
        raise Conflict("nothing is known of the size of the run's base model", place=source.id, remedy="Register the base model again.")
    workload, folder = Workload.model_validate(model.workload), context.settings.run_folder(source.id) / "export"
    largest = max(unit.parameters for unit in workload.units)
    return shape_of(read_config(folder), parameters=workload.parameters, largest_parameters=largest, place=source.id)


def _too_large(
    suitable: Sequence[str], on_gpu: AnswerMemory, on_cpu: AnswerMemory, largest_gpu: int, ram: int, tokens: int
) -> CapacityError:
    """The refusal of what would wait for ever."""
    has_cpu = any(name.startswith("cpu") for name in suitable)
    if largest_gpu and on_gpu.gpu_bytes > largest_gpu:
        need, have, place = on_gpu.gpu_bytes, largest_gpu, "GPU memory"
    else:
        need, have, place = on_cpu.ram_bytes if has_cpu else on_gpu.ram_bytes, ram, "host memory"
    return CapacityError(
        f"an answer with up to {tokens:,} tokens of conversation takes {format_bytes(need)} of {place}, and the machine has"
        f" {format_bytes(have)} on one device",
        need_bytes=need,
        have_bytes=have,
        place=place,
        remedy="Ask for fewer tokens (max_new_tokens) or in a shorter conversation; a model that does not fit by itself is asked elsewhere:"
        " download it.",
    )
