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
    """CPU, RAM, GPUs and state directories as they are now."""
    facts = context.hardware.facts()
    return HardwareView(facts=facts.model_dump(mode="json"), choices=service.choices(facts, context.settings))
