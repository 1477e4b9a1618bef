"""/api/v1/hardware: what the machine has, what the product chose, and measuring it."""

from __future__ import annotations

from fastapi import APIRouter, Response

from lohan_app.auth.dependencies import Reader, RequireAdmin
from lohan_app.context import Context
from lohan_app.hardware import measuring, service
from lohan_app.hardware.schemas import HardwareView, ProfileList, ProfileRequest
from lohan_app.runs.api import IdempotencyKey, reply
from lohan_app.runs.schemas import RunDetail

router = APIRouter(tags=["hardware"])


@router.get("/hardware")
def hardware(identity: Reader, context: Context) -> HardwareView:
    """CPU, RAM, GPUs and state directories as they are now, and how fast they were measured to be."""
    facts = context.hardware.facts()
    profile, fault = service.measured(facts, context.settings)
    return HardwareView(
        facts=facts.model_dump(mode="json"),
        gpu_users=service.gpu_users(context.engine, context.settings, facts),
        choices=service.choices(facts, context.settings),
        profile=profile,
        profile_problem=fault.to_dict() if fault is not None else None,
        measurement=measuring.current(context, identity),
    )


@router.get("/hardware/profiles")
def list_profiles(_: Reader, context: Context) -> ProfileList:
    """What was measured, of this machine and of what it was with other GPUs or drives; newest first."""
    return ProfileList(items=measuring.list_profiles(context))


@router.post("/hardware/profiles", status_code=201)
def measure(
    body: ProfileRequest, identity: RequireAdmin, context: Context, response: Response, idempotency_key: IdempotencyKey = None
) -> RunDetail:
    """Queue a run of kind `profile` that measures the machine; it reserves its device like any other run."""
    answer = measuring.submit(context, identity, body, idempotency_key)
    response.headers["Location"] = f"/api/v1/runs/{answer.run.id}"
    return reply(answer, response)
