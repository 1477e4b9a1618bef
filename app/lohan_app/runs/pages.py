"""Pages of the runs: list, new run with its plan, and the run itself."""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from lohan.config import Precision
from lohan.errors import CapacityError, LohanError
from lohan_app.auth.dependencies import PageUser, require_admin, require_session
from lohan_app.auth.schemas import Identity, Scope
from lohan_app.base_models import service as base_models
from lohan_app.context import AppContext, Context
from lohan_app.datasets import service as datasets
from lohan_app.datasets.schemas import DatasetView
from lohan_app.entities import BaseModelState, DatasetState, RunKind, RunState
from lohan_app.entities.base import now
from lohan_app.errors import problem_of_error
from lohan_app.forms import FormError
from lohan_app.hardware.service import device_choices
from lohan_app.paging import MAXIMUM_LIMIT, After
from lohan_app.runs import chat_panel, chats, exports, forecasts, lifecycle, presentation, requests, run_form, service
from lohan_app.runs.schemas import ExportRequest, RunDetail
from lohan_app.runs.states import ACTIVE_STATES
from lohan_app.storage import service as storage
from lohan_app.storage.retention import rules_of, trash_expiry
from lohan_app.templating import render

router = APIRouter(dependencies=[Depends(require_session)])

RUNS_SHOWN = 25
EVENTS_SHOWN = 200
BUSY_STATES = ACTIVE_STATES | {RunState.QUEUED, RunState.PAUSED}  # a full drive's pause ends by itself
# Name in the address -> label and states; all states where there are none.
FILTERS: dict[str, tuple[str, frozenset[RunState]]] = {
    "all": ("All", frozenset()),
    "running": ("Running", ACTIVE_STATES),
    "queued": ("Queued", frozenset({RunState.QUEUED, RunState.PAUSED, RunState.DRAFT})),
    "succeeded": ("Succeeded", frozenset({RunState.SUCCEEDED})),
    "failed": ("Failed", frozenset({RunState.FAILED})),
    "cancelled": ("Cancelled", frozenset({RunState.CANCELLED})),
}
Show = Annotated[str, Query(alias="show", max_length=20)]
KINDS = {RunKind.TRAIN: "Trainings", RunKind.PROFILE: "Measurements", RunKind.EXPORT: "Exports", RunKind.CHAT: "Chats"}
EVERY_KIND = "all"
ShownChat = Annotated[str, Query(alias="chat", max_length=64)]
ShownKind = Annotated[str, Query(alias="kind", max_length=20)]


async def _form(request: Request) -> dict[str, str]:
    """The sent fields as text; a field sent twice counts once."""
    return {name: value for name, value in (await request.form()).items() if isinstance(value, str)}


Form = Annotated[dict[str, str], Depends(_form)]


# ---------------------------------------------------------------- list
def _list_fields(
    context: AppContext, identity: Identity, show: str, kind: str, after: str | None, problem: LohanError | None = None
) -> dict[str, Any]:
    chosen = show if show in FILTERS else "all"
    kind = kind if kind in (*KINDS, EVERY_KIND) else RunKind.TRAIN
    wanted = None if kind == EVERY_KIND else RunKind(kind)
    page = service.list_runs(context, identity, after, RUNS_SHOWN, states=FILTERS[chosen][1] or None, kind=wanted)
    return {
        "runs": page.items,
        "show": chosen,
        "kind": str(kind),
        "after": after,
        "next_after": page.next_cursor,
        # A filtered list may gain runs that were in another state before; only a page of ended runs stays as it is.
        "is_busy": any(run.state in BUSY_STATES for run in page.items) or chosen in ("running", "queued"),
        "phase_names": presentation.PHASE_NAMES,
        "failure_words": {cause: f"{words[0].upper()}{words[1:]}" for cause, words in presentation.FAILURE_WORDS.items()},
        "quick_actions": presentation.QUICK_ACTIONS,
        "may_write": identity.may(Scope.RUNS),
        "places": service.queue_places(context) if any(run.state is RunState.QUEUED for run in page.items) else {},
        "new_key": _new_key,
        "problem": problem,
    }


def _new_key() -> str:
    """For a form's hidden field: a second click or a reload is answered as the first."""
    return uuid.uuid4().hex


@router.get("/runs")
def runs_page(
    request: Request, identity: PageUser, context: Context, show: Show = "all", kind: ShownKind = RunKind.TRAIN, after: After = None
) -> HTMLResponse:
    fields = _list_fields(context, identity, show, kind, after)
    fields["filters"] = [(name, label) for name, (label, _) in FILTERS.items()]
    fields["kinds"] = [*((str(name), label) for name, label in KINDS.items()), (EVERY_KIND, "All kinds")]
    return render(request, "runs/index.html", fields, viewer=identity)


@router.get("/runs/partials/list")
def runs_list(
    request: Request, identity: PageUser, context: Context, show: Show = "all", kind: ShownKind = RunKind.TRAIN, after: After = None
) -> HTMLResponse:
    return render(request, "runs/_list.html", _list_fields(context, identity, show, kind, after), viewer=identity)


@router.post("/runs/partials/list/{run_id}/{wanted}")
def ask_from_list(
    request: Request,
    identity: PageUser,
    context: Context,
    form: Form,
    run_id: str,
    wanted: requests.Request,
    show: Show = "all",
    kind: ShownKind = RunKind.TRAIN,
    after: After = None,
) -> HTMLResponse:
    """Ask something of a run in the list; the list comes back, with the reason where it was refused."""
    problem = None
    try:
        _ask(context, identity, run_id, wanted, form)
    except LohanError as error:
        problem = error
    return render(request, "runs/_list.html", _list_fields(context, identity, show, kind, after, problem), viewer=identity)


# ---------------------------------------------------------------- new run
def _suggested_precision(context: AppContext) -> tuple[Precision, str]:
    try:
        return service.suggest_precision(context)
    except LohanError:
        return Precision.BF16, ""


def _usable_datasets(context: AppContext, identity: Identity) -> list[DatasetView]:
    usable = (DatasetState.READY, DatasetState.HAS_BAD_ROWS)
    return [dataset for dataset in datasets.list_datasets(context, identity, limit=MAXIMUM_LIMIT).items if dataset.state in usable]


def _form_fields(context: AppContext, identity: Identity, values: dict[str, Any], error: LohanError | None = None) -> dict[str, Any]:
    """Everything the form shows; an unknown or missing choice becomes the first there is."""
    models = [model for model in base_models.list_models(context).items if model.state is BaseModelState.READY]
    usable = _usable_datasets(context, identity)
    for name, choices in (("base_model_id", models), ("dataset_id", usable)):
        if values[name] not in [choice.id for choice in choices]:
            values[name] = choices[0].id if choices else ""
    faults: Mapping[str, str] = error.faults if isinstance(error, FormError) else {}
    chosen = next((dataset for dataset in usable if dataset.id == values["dataset_id"]), None)
    return {
        "models": [(model.id, model.name) for model in models],
        "datasets": [(dataset.id, dataset.name) for dataset in usable],
        "devices": device_choices(context),
        "precision_reason": _suggested_precision(context)[1],
        "kept_states": presentation.kept_for(context.settings.keep_states_days),
        "kept_failed_states": presentation.kept_for(context.settings.keep_failed_states_days),
        "values": values,
        "faults": defaultdict(str, faults),
        "problem": error,
        "opens_more": any(name in run_form.MORE_FIELDS for name in faults),
        "bad_rows": chosen if chosen is not None and chosen.bad_row_count else None,
        "swap_out_of_band": False,
        "plan": None,
        "shortage": None,
        "plan_problem": None,
    }


def _plan_fields(context: AppContext, identity: Identity, form: Mapping[str, str]) -> dict[str, Any]:
    """The plan, or why there is none."""
    if not form.get("base_model_id"):
        return {}
    try:
        request = run_form.read_plan_request(form)
        plan = service.plan(context, identity, request).model_dump(mode="json")
        steps = service.planned_steps(context, identity, request.training, request.dataset_id)
    except CapacityError as error:
        return {"shortage": error}
    except LohanError as error:
        return {"plan_problem": error}
    return {"plan": plan} | forecasts.forecast_fields(plan, steps)


@router.get("/runs/new")
def new_run_page(
    request: Request, identity: PageUser, context: Context, base_model_id: str = "", dataset_id: str = "", from_run: str = ""
) -> HTMLResponse:
    """The form as it opens; with the settings of `from_run` where one is named."""
    values = run_form.default_values(_suggested_precision(context)[0]) | {"base_model_id": base_model_id, "dataset_id": dataset_id}
    if from_run:
        values |= run_form.values_of(service.get_run(context, identity, from_run))
    fields = _form_fields(context, identity, values) | {"idempotency_key": _new_key()}
    if values["base_model_id"] and not from_run:
        context_length = base_models.get_model(context, values["base_model_id"]).context_length
        values["sequence_length"] = min(values["sequence_length"], context_length)
    fields |= _plan_fields(context, identity, {name: str(value) for name, value in values.items()})
    return render(request, "runs/new.html", fields, viewer=identity)


@router.post("/runs/partials/plan")
def plan_preview(request: Request, identity: PageUser, context: Context, form: Form) -> HTMLResponse:
    fields = _form_fields(context, identity, run_form.kept_values(form)) | {"swap_out_of_band": True}
    return render(request, "runs/_preview.html", fields | _plan_fields(context, identity, form), viewer=identity)


def _fallback_name(context: AppContext, identity: Identity, form: Mapping[str, str]) -> str:
    model = base_models.get_model(context, form.get("base_model_id", "")).name
    return f"{model} on {datasets.get_dataset(context, identity, form.get('dataset_id', '')).name}"


@router.post("/runs")
def submit_run(request: Request, identity: PageUser, context: Context, form: Form) -> Response:
    """Queue the run; the form's hidden key makes a second click or a reload answer with the same run."""
    try:
        wanted = run_form.read_run_request(form, fallback_name=_fallback_name(context, identity, form))
        submission = service.submit(context, identity, wanted, form.get("idempotency_key") or None)
    except LohanError as error:
        fields = _form_fields(context, identity, run_form.kept_values(form), error)
        fields |= {"idempotency_key": _new_key()} | _plan_fields(context, identity, form)
        return render(request, "runs/new.html", fields, viewer=identity, status_code=problem_of_error(error).status)
    return RedirectResponse(f"/runs/{submission.run.id}", 303)


# ---------------------------------------------------------------- one run
def _summary(context: AppContext, identity: Identity, run_id: str) -> dict[str, Any]:
    run = service.get_run(context, identity, run_id)
    latest = service.metrics(context, identity, run_id, after_step=max(0, run.step - 1)).data
    speed = latest[-1].tokens_per_second if latest else None
    fields = presentation.summary_fields(run, tokens_per_second=speed, may_write=identity.may(Scope.RUNS)) | {"new_key": _new_key}
    fields["can_chat"] = chats.can_be_asked(context, run)
    fields["can_export"] = identity.may(Scope.RUNS) and exports.can_export(context, run)
    expiry = storage.states_expiry_of(context, identity, run_id) if fields["is_terminal"] else None
    return fields | presentation.retention_fields(run, expiry)


def _events(context: AppContext, identity: Identity, run_id: str) -> list[dict[str, Any]]:
    return presentation.describe_events(service.recorded_events(context, identity, run_id))[:EVENTS_SHOWN]


@router.get("/runs/{run_id}")
def run_page(request: Request, identity: PageUser, context: Context, run_id: str, chat: ShownChat = "") -> HTMLResponse:
    return _run_page(request, context, identity, run_id, chat=chat)


def _run_page(
    request: Request,
    context: AppContext,
    identity: Identity,
    run_id: str,
    problem: LohanError | None = None,
    *,
    chat: str = "",
    panel: dict[str, Any] | None = None,
) -> HTMLResponse:
    """The page; `chat` is the one that its panel shows, or `panel` all that this does."""
    fields = _summary(context, identity, run_id)
    run: RunDetail = fields["run"]
    if run.kind is RunKind.TRAIN:
        fields |= _forecast_fields(context, identity, run)
    if run.kind is RunKind.CHAT:
        fields["talk"] = chat_panel.talk_fields(run)
    if fields["can_chat"]:
        fields |= panel or _panel(context, identity, run, chat)
    fields |= {
        "events": _events(context, identity, run_id),
        "plan": run.started_plan or run.plan,
        "settings": presentation.describe_settings(run),
        "trash_expiry": trash_expiry(now(), rules_of(context.settings)),
        "trash_days": presentation.kept_for(context.settings.trash_days),
        "problem": problem,
    }
    return render(request, "runs/detail.html", fields, viewer=identity, status_code=problem_of_error(problem).status if problem else 200)


def _forecast_fields(context: AppContext, identity: Identity, run: RunDetail) -> dict[str, Any]:
    """What is foreseen of the run: as planned, as it began, as its first steps corrected it."""
    steps = run.total_steps or service.planned_steps_of(context, identity, run)
    shown = forecasts.forecast_fields(run.started_plan or run.plan, steps, corrected_seconds=run.corrected_step_seconds)
    return shown | {
        "forecasts": forecasts.forecast_history(run.plan, run.started_plan, run.corrected_step_seconds),
        "plan_changes": forecasts.plan_changes(run.plan, run.started_plan),
    }


@router.get("/runs/{run_id}/partials/forecast")
def run_forecast(request: Request, identity: PageUser, context: Context, run_id: str) -> HTMLResponse:
    fields = _summary(context, identity, run_id)
    return render(request, "runs/_foreseen.html", fields | _forecast_fields(context, identity, fields["run"]), viewer=identity)


@router.get("/runs/{run_id}/partials/summary")
def run_summary(request: Request, identity: PageUser, context: Context, run_id: str) -> HTMLResponse:
    return render(request, "runs/_summary.html", _summary(context, identity, run_id), viewer=identity)


@router.get("/runs/{run_id}/partials/events")
def run_events(request: Request, identity: PageUser, context: Context, run_id: str) -> HTMLResponse:
    fields = _summary(context, identity, run_id) | {"events": _events(context, identity, run_id)}
    return render(request, "runs/_events.html", fields, viewer=identity)


def _ask(context: AppContext, identity: Identity, run_id: str, wanted: requests.Request, form: Mapping[str, str]) -> str:
    """Do what was asked of the run; returns the address to look at then."""
    key = form.get("idempotency_key") or None
    match wanted:
        case requests.Request.RETRY:
            return f"/runs/{lifecycle.retry(context, identity, run_id, key).run.id}"
        case requests.Request.CLONE:
            return f"/runs/{lifecycle.clone(context, identity, run_id, key).run.id}"
        case requests.Request.DELETE:
            lifecycle.delete(context, identity, run_id)
            return "/runs"
        case _:
            lifecycle.ask(context, identity, run_id, wanted, key)
            return f"/runs/{run_id}"


@router.post("/runs/{run_id}/priority", dependencies=[Depends(require_admin)])
def set_priority(request: Request, identity: PageUser, context: Context, form: Form, run_id: str) -> Response:
    """Set the run's priority; where that is refused, its page says why."""
    try:
        lifecycle.set_priority(context, identity, run_id, run_form.read_priority(form))
    except LohanError as error:
        return _run_page(request, context, identity, run_id, error)
    return RedirectResponse(f"/runs/{run_id}", 303)


@router.post("/runs/{run_id}/exports")
def export_run(request: Request, identity: PageUser, context: Context, form: Form, run_id: str) -> Response:
    """Queue an export; its own page follows. Where it is refused, the run's page says why."""
    try:
        wanted = ExportRequest(dtype=Precision(form["dtype"]) if form.get("dtype") in list(Precision) else None)
        made = exports.submit_export(context, identity, run_id, wanted, form.get("idempotency_key") or None)
    except LohanError as error:
        return _run_page(request, context, identity, run_id, error)
    return RedirectResponse(f"/runs/{made.run.id}", 303)


# ---------------------------------------------------------------- chats
def _panel(
    context: AppContext,
    identity: Identity,
    run: RunDetail,
    chat: str,
    *,
    form: Mapping[str, str] | None = None,
    problem: LohanError | None = None,
) -> dict[str, Any]:
    """What the chat on a run's page shows: the conversation of `chat`, else the latest."""
    talks = chats.talks(context, identity, run.id)
    chosen = chat or (talks[0].id if talks else chat_panel.NEW)
    shown = None if chosen == chat_panel.NEW else chats.find_chat(context, identity, run.id, chosen)
    fields = chat_panel.panel_fields(run, shown, talks, form=form, problem=problem)
    return fields | {"new_key": _new_key, "may_write": identity.may(Scope.RUNS)}


def _panel_alone(request: Request, context: AppContext, identity: Identity, run_id: str, chat: str, **fields: Any) -> HTMLResponse:
    run = service.get_run(context, identity, run_id)
    return render(request, "runs/_chat.html", _panel(context, identity, run, chat, **fields), viewer=identity)


@router.get("/runs/{run_id}/partials/chats")
def chat_of_run(request: Request, identity: PageUser, context: Context, run_id: str, chat: ShownChat = "") -> HTMLResponse:
    return _panel_alone(request, context, identity, run_id, chat)


@router.get("/runs/{run_id}/partials/talk")
def talk_of_chat(request: Request, identity: PageUser, context: Context, run_id: str) -> HTMLResponse:
    run = service.get_run(context, identity, run_id)
    return render(request, "runs/_conversation.html", {"run": run, "talk": chat_panel.talk_fields(run)}, viewer=identity)


@router.post("/runs/{run_id}/partials/chats")
def ask_in_panel(request: Request, identity: PageUser, context: Context, form: Form, run_id: str) -> HTMLResponse:
    """Queue a question; the panel comes back with its place in the queue, or with the reason why it was refused."""
    try:
        made = chats.submit_chat(context, identity, run_id, chat_panel.read_chat_request(form), form.get("idempotency_key") or None)
    except LohanError as error:
        return _panel_alone(request, context, identity, run_id, form.get("shown") or chat_panel.NEW, form=form, problem=error)
    return _panel_alone(request, context, identity, run_id, made.run.id)


@router.post("/runs/{run_id}/partials/chats/{chat_id}/{wanted}")
def ask_of_chat(
    request: Request, identity: PageUser, context: Context, form: Form, run_id: str, chat_id: str, wanted: requests.Request
) -> HTMLResponse:
    """Cancel the answer, or ask once more; the panel comes back."""
    try:
        address = _ask(context, identity, chat_id, wanted, form)
    except LohanError as error:
        return _panel_alone(request, context, identity, run_id, chat_id, problem=error)
    return _panel_alone(request, context, identity, run_id, address.rpartition("/")[2])


@router.post("/runs/{run_id}/chats")
def ask_model(request: Request, identity: PageUser, context: Context, form: Form, run_id: str) -> Response:
    """The same without a script: the run's page comes back."""
    try:
        made = chats.submit_chat(context, identity, run_id, chat_panel.read_chat_request(form), form.get("idempotency_key") or None)
    except LohanError as error:
        run = service.get_run(context, identity, run_id)
        if not chats.can_be_asked(context, run):
            return _run_page(request, context, identity, run_id, error)
        panel = _panel(context, identity, run, form.get("shown") or chat_panel.NEW, form=form, problem=error)
        return _run_page(request, context, identity, run_id, panel=panel)
    return RedirectResponse(f"/runs/{run_id}?chat={made.run.id}#chat", 303)


@router.post("/runs/{run_id}/{wanted}")
def ask_of_run(request: Request, identity: PageUser, context: Context, form: Form, run_id: str, wanted: requests.Request) -> Response:
    """Ask something of the run; where it is refused, the run's page says why and what is possible."""
    try:
        address = _ask(context, identity, run_id, wanted, form)
    except LohanError as error:
        return _run_page(request, context, identity, run_id, error)
    return RedirectResponse(address, 303)
