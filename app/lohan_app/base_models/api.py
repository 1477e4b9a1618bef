"""/api/v1: base models."""

from __future__ import annotations

from fastapi import APIRouter

router = APIRouter(tags=["base_models"])
