"""/api/v1/hardware: what the machine has and what the product chose."""

from __future__ import annotations

from fastapi import APIRouter

from lohan_app.auth.dependencies import Reader
from lohan_app.context import Context
from lohan_app.hardware import service
from lohan_app.hardware.schemas import HardwareView

router = APIRouter(tags=["hardware"])


@router.get("/hardware")
def hardware(_: Reader, context: Context) -> HardwareView:
    """CPU, RAM, GPUs and state directories as they are now, and how fast they were measured to be."""
    facts = context.hardware.facts()
    profile, fault = service.measured(facts, context.settings)
    return HardwareView(
        facts=facts.model_dump(mode="json"),
        gpu_users=service.gpu_users(context.engine, context.settings, facts),
        choices=service.choices(facts, context.settings),
        profile=profile,
        profile_problem=fault.to_dict() if fault is not None else None,
    )
