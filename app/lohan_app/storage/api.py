"""/api/v1/storage: who holds what on the drives, and until when."""

from __future__ import annotations

from fastapi import APIRouter

from lohan_app.auth.dependencies import Reader, RunWriter
from lohan_app.context import Context
from lohan_app.runs.schemas import RunDetail
from lohan_app.storage import service
from lohan_app.storage.schemas import StorageView

router = APIRouter(tags=["storage"])


@router.get("/storage")
def storage(identity: Reader, context: Context) -> StorageView:
    """Drives, what holds their space (measured once a minute), when it expires, and what each user holds of their quota."""
    return service.overview(context, identity)


@router.post("/runs/{run_id}/restore")
def restore(run_id: str, identity: RunWriter, context: Context) -> RunDetail:
    """Take a deleted run out of the trash, with its result, log and curve; 409 once that is emptied. Its states are not restored."""
    return service.restore(context, identity, run_id)


@router.delete("/runs/{run_id}/states", status_code=204)
def free_states(run_id: str, identity: RunWriter, context: Context) -> None:
    """Free what a run that has ended could be gone on from, before it expires. Its result and log stay."""
    service.free_states(context, identity, run_id)
