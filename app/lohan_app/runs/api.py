"""/api/v1: plans and runs."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Query, Response
from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool

from lohan.planning.plan import Plan
from lohan_app.auth.dependencies import Reader, RequireAdmin, RunWriter
from lohan_app.context import Context
from lohan_app.entities import Metric, RunKind, RunState
from lohan_app.paging import DEFAULT_LIMIT, After, Limit, Page
from lohan_app.runs import chats, exports, lifecycle, service
from lohan_app.runs.archive import content_disposition, file_name_of, stream_zip
from lohan_app.runs.requests import Request
from lohan_app.runs.schemas import (
    ChatRequest,
    CurvesView,
    ExportRequest,
    LogView,
    MetricsView,
    PlanRequest,
    RunChange,
    RunDetail,
    RunRequest,
    RunView,
)
from lohan_app.runs.service import Submission
from lohan_app.runs.stream import parse_event_id

router = APIRouter(tags=["runs"])

IdempotencyKey = Annotated[str | None, Header(description="The same key and body get the same reply, and are acted on once.")]
Step = Annotated[int, Query(ge=0, le=service.LAST_STEP)]
# A proxy that buffers (nginx) would hold events back.
STREAM_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


@router.post("/plans")
def make_plan(body: PlanRequest, identity: RunWriter, context: Context) -> Plan:
    """How a run's bytes would be divided over GPU memory, RAM and SSD; 409 with need and have where they do not fit. Stores nothing."""
    return service.plan(context, identity, body)


@router.post("/runs", status_code=201)
def submit(
    body: RunRequest,
    identity: RunWriter,
    context: Context,
    response: Response,
    idempotency_key: IdempotencyKey = None,
) -> RunDetail:
    """Queue a run."""
    submission = service.submit(context, identity, body, idempotency_key)
    response.headers["Location"] = f"/api/v1/runs/{submission.run.id}"
    if submission.is_replay:
        response.headers["Idempotent-Replayed"] = "true"
    return submission.run


@router.get("/runs")
def list_runs(
    identity: Reader,
    context: Context,
    after: After = None,
    limit: Limit = DEFAULT_LIMIT,
    state: RunState | None = None,
    kind: RunKind | None = None,
) -> Page[RunView]:
    """Newest first; of every kind where none is named."""
    return service.list_runs(context, identity, after, limit, None if state is None else {state}, kind)


@router.get("/runs/{run_id}")
def get_run(run_id: str, identity: Reader, context: Context) -> RunDetail:
    return service.get_run(context, identity, run_id)


@router.patch("/runs/{run_id}")
def change_run(run_id: str, body: RunChange, identity: RequireAdmin, context: Context) -> RunDetail:
    """Set the priority of a run that has not ended (administrators); 409 where it has."""
    return lifecycle.set_priority(context, identity, run_id, body.priority)


@router.get("/runs/{run_id}/metrics")
def metrics(run_id: str, identity: Reader, context: Context, after_step: Step = 0, to_step: Step = service.LAST_STEP) -> MetricsView:
    """Steps after `after_step` up to `to_step`, at most 2,000 of them; of more those that keep the loss's minima, maxima and gaps."""
    return service.metrics(context, identity, run_id, after_step, to_step)


@router.get("/runs/{run_id}/curves")
def curves(
    run_id: str,
    identity: Reader,
    context: Context,
    metric: Annotated[list[Metric] | None, Query(description="May be given several times; all where it is not given.")] = None,
    after_step: Step = 0,
    to_step: Step = service.LAST_STEP,
) -> CurvesView:
    """Each number's minimum, maximum, mean, first and last value in at most 400 buckets of steps, with gaps and missing steps."""
    return service.curves(context, identity, run_id, list(dict.fromkeys(metric or Metric)), after_step, to_step)


@router.get("/runs/{run_id}/log")
def log_tail(run_id: str, identity: Reader, context: Context, offset: Annotated[int | None, Query(ge=0, le=2**62)] = None) -> LogView:
    """The trainer's log from byte `offset` on; its last part where no offset is given."""
    return service.log_tail(context, identity, run_id, offset)


# ---------------------------------------------------------------- requests
def reply(answer: Submission, response: Response) -> RunDetail:
    """The run, with the header that tells a repeated reply."""
    if answer.is_replay:
        response.headers["Idempotent-Replayed"] = "true"
    return answer.run


@router.post("/runs/{run_id}/pause")
def pause(run_id: str, identity: RunWriter, context: Context, response: Response, idempotency_key: IdempotencyKey = None) -> RunDetail:
    """A run at work finishes its step and keeps what it can go on from; one that waits is paused at once."""
    return reply(lifecycle.ask(context, identity, run_id, Request.PAUSE, idempotency_key), response)


@router.post("/runs/{run_id}/resume")
def resume(run_id: str, identity: RunWriter, context: Context, response: Response, idempotency_key: IdempotencyKey = None) -> RunDetail:
    """Back into the queue; it goes on from its last recorded step."""
    return reply(lifecycle.ask(context, identity, run_id, Request.RESUME, idempotency_key), response)


@router.post("/runs/{run_id}/stop")
def stop(run_id: str, identity: RunWriter, context: Context, response: Response, idempotency_key: IdempotencyKey = None) -> RunDetail:
    """End the training after the step at work, and keep its weights as the run's result."""
    return reply(lifecycle.ask(context, identity, run_id, Request.STOP, idempotency_key), response)


@router.post("/runs/{run_id}/cancel")
def cancel(run_id: str, identity: RunWriter, context: Context, response: Response, idempotency_key: IdempotencyKey = None) -> RunDetail:
    """A run that waits is cancelled at once; one at work finishes its step first. Nothing of it is kept."""
    return reply(lifecycle.ask(context, identity, run_id, Request.CANCEL, idempotency_key), response)


@router.post("/runs/{run_id}/force-stop")
def force_stop(run_id: str, identity: RunWriter, context: Context, response: Response, idempotency_key: IdempotencyKey = None) -> RunDetail:
    """Kill a trainer that does not react. The run is paused at its last recorded step, or cancelled where that was asked for."""
    return reply(lifecycle.ask(context, identity, run_id, Request.FORCE_STOP, idempotency_key), response)


@router.post("/runs/{run_id}/submit")
def submit_draft(
    run_id: str, identity: RunWriter, context: Context, response: Response, idempotency_key: IdempotencyKey = None
) -> RunDetail:
    """Put a draft into the queue, with a plan for the machine as it is now; 409 with need and have where it does not fit."""
    return reply(lifecycle.ask(context, identity, run_id, Request.SUBMIT, idempotency_key), response)


@router.post("/runs/{run_id}/retry", status_code=201)
def retry(run_id: str, identity: RunWriter, context: Context, response: Response, idempotency_key: IdempotencyKey = None) -> RunDetail:
    """A new run, `parent_id` naming this one, that goes on from what a failed run has recorded; from the start where it has nothing."""
    answer = lifecycle.retry(context, identity, run_id, idempotency_key)
    response.headers["Location"] = f"/api/v1/runs/{answer.run.id}"
    return reply(answer, response)


@router.post("/runs/{run_id}/clone", status_code=201)
def clone(run_id: str, identity: RunWriter, context: Context, response: Response, idempotency_key: IdempotencyKey = None) -> RunDetail:
    """A draft with the same settings; `POST …/submit` queues it."""
    answer = lifecycle.clone(context, identity, run_id, idempotency_key)
    response.headers["Location"] = f"/api/v1/runs/{answer.run.id}"
    return reply(answer, response)


@router.post("/runs/{run_id}/exports", status_code=201)
def export(
    run_id: str, body: ExportRequest, identity: RunWriter, context: Context, response: Response, idempotency_key: IdempotencyKey = None
) -> RunDetail:
    """Queue a run of kind `export`: what a paused, failed or cancelled run has recorded, as a Hugging Face folder to download."""
    answer = exports.submit_export(context, identity, run_id, body, idempotency_key)
    response.headers["Location"] = f"/api/v1/runs/{answer.run.id}"
    return reply(answer, response)


@router.get("/runs/{run_id}/exports")
def list_exports(run_id: str, identity: Reader, context: Context, after: After = None, limit: Limit = DEFAULT_LIMIT) -> Page[RunView]:
    """The exports of a run, newest first."""
    return exports.list_exports(context, identity, run_id, after, limit)


@router.post("/runs/{run_id}/chats", status_code=201)
def chat(
    run_id: str, body: ChatRequest, identity: RunWriter, context: Context, response: Response, idempotency_key: IdempotencyKey = None
) -> RunDetail:
    """Queue a run of kind `chat`: the model that this run has as its result answers the conversation; 409 where there is none yet, and with
    need and have where no device can hold it."""
    answer = chats.submit_chat(context, identity, run_id, body, idempotency_key)
    response.headers["Location"] = f"/api/v1/runs/{answer.run.id}"
    return reply(answer, response)


@router.get("/runs/{run_id}/chats")
def list_chats(run_id: str, identity: Reader, context: Context, after: After = None, limit: Limit = DEFAULT_LIMIT) -> Page[RunView]:
    """The chats with a run, newest first; `GET /runs/{id}` of one has what was said and answered."""
    return chats.list_chats(context, identity, run_id, after, limit)


@router.delete("/runs/{run_id}", status_code=204)
def delete(run_id: str, identity: RunWriter, context: Context) -> None:
    """Delete a run that has ended, or a draft, with all its files."""
    lifecycle.delete(context, identity, run_id)


@router.get("/runs/{run_id}/events", response_class=StreamingResponse, responses={200: {"content": {"text/event-stream": {}}}})
async def events(
    run_id: str,
    identity: Reader,
    context: Context,
    last_event_id: Annotated[str | None, Header()] = None,
    resume_after: Annotated[str | None, Query(alias="last_event_id")] = None,
) -> StreamingResponse:
    """Server-sent events: `state` first and at every change, then what the trainer says: `started`, `phase`, `step`,
    `evaluation`, `plan_corrected`, `answer_part`, `answer`, `note`, `warning`, `exit`.

    Resumes behind `Last-Event-ID` (or the query parameter `last_event_id`, as the metrics give it); without either it starts now.
    """
    cursor = parse_event_id(last_event_id or resume_after)
    await run_in_threadpool(service.get_run, context, identity, run_id)
    stream = await context.events.stream(run_id, identity.user_id, cursor)
    return StreamingResponse(stream, media_type="text/event-stream", headers=STREAM_HEADERS)


@router.get("/runs/{run_id}/download", response_class=StreamingResponse, responses={200: {"content": {"application/zip": {}}}})
def download(run_id: str, identity: Reader, context: Context) -> StreamingResponse:
    """The fine-tuned model as a zip of its Hugging Face folder."""
    folder, name = service.export_of(context, identity, run_id)
    top = file_name_of(name)
    headers = {"Content-Disposition": content_disposition(f"{top}.zip")}
    return StreamingResponse(stream_zip(folder, top=top), media_type="application/zip", headers=headers)
