"""Measuring the machine from the page and by REST: a run of kind `profile`, and what such runs have left in the folder of profiles."""

from __future__ import annotations

from sqlalchemy.orm import Session

from lohan.errors import ConfigError
from lohan.planning.workload import UnitKind, Workload
from lohan.units import GIB, MIB
from lohan_app.auth.schemas import Identity
from lohan_app.base_models import repository as base_models
from lohan_app.base_models import service as base_models_service
from lohan_app.context import AppContext
from lohan_app.db import read_transaction
from lohan_app.entities import BaseModel, Run, RunKind, RunState
from lohan_app.errors import Forbidden
from lohan_app.hardware.schemas import MeasurementView, ProfileRequest, ProfileView
from lohan_app.hardware.service import usable
from lohan_app.runs import queries
from lohan_app.runs.kinds import Needs, settings_of
from lohan_app.runs.once import Answer, queue_once
from lohan_app.runs.planning import check_device
from lohan_app.runs.schemas import view_of
from lohan_app.runs.service import checked_model
from lohan_app.runs.states import ACTIVE_STATES

RAM_BYTES = 2 * GIB
"""torch, and the largest arrays that are copied and updated at a time."""
FILE_BYTES = 512 * MIB
"""In each state directory, while it is measured."""
BLOCK_BYTES_PER_PARAMETER = 12
"""Weights, their gradients and what is computed with them, in fp32, where the block is computed on the CPU."""


def submit(context: AppContext, identity: Identity, request: ProfileRequest, idempotency_key: str | None = None) -> Answer:
    """Queue a measurement of the machine.

    Raises:
        Forbidden: only administrators measure: runs wait for it.
        NotFound, Conflict: there is no such base model, or it cannot be used.
        Unprocessable: runs may not use such a device; or the idempotency key is malformed, or was used for another request.
    """
    if not identity.is_admin:
        raise Forbidden("only administrators measure the machine", remedy="Ask an administrator.")
    facts = context.hardware.facts()
    check_device(request.device, usable(facts, context.settings), context.settings, place="device")

    def make(session: Session) -> Run:
        # Its row is held, so that it cannot be deleted before the run is there to need it.
        model_id = request.base_model_id
        model = checked_model(base_models.get_locked(session, model_id)) if model_id is not None else None
        return Run(
            kind=RunKind.PROFILE,
            owner_id=identity.user_id,
            name=f"Measurement with {model.name}" if model is not None else "Measurement",
            base_model_id=model_id,
            settings=settings_of(RunKind.PROFILE, request.model_dump(mode="json"), _needs(context, request, model)),
        )

    return queue_once(context, identity, f"measure {request.model_dump_json()}", idempotency_key, make, action="hardware.measure")


def _needs(context: AppContext, request: ProfileRequest, model: BaseModel | None) -> Needs:
    ram_bytes = RAM_BYTES
    if model is not None and model.workload is not None:
        units = Workload.model_validate(model.workload).units
        ram_bytes += BLOCK_BYTES_PER_PARAMETER * max(unit.parameters for unit in units if unit.kind is not UnitKind.EMBEDDING)
    ssd_bytes = FILE_BYTES * len(context.settings.state_folders) if request.drives else 0
    return Needs(device=request.device, ram_bytes=ram_bytes, ssd_bytes=ssd_bytes)


def current(context: AppContext, identity: Identity) -> MeasurementView | None:
    """The newest measurement, None where there was none: all see how far it is, its owner and administrators the run behind it."""
    with read_transaction(context.engine) as session:
        rows = queries.list_runs(session, owner_id=None, states=None, after=None, limit=1, kind=RunKind.PROFILE)
        if not rows:
            return None
        run = view_of(rows[0])
    return MeasurementView(
        state=run.state,
        is_going_on=run.state in ACTIVE_STATES or run.state is RunState.QUEUED,
        progress=run.phase_progress if run.state in ACTIVE_STATES else None,
        eta_seconds=run.eta_seconds,
        base_model_name=run.base_model_name,
        finished_at=run.finished_at,
        run=run if identity.may_see(run.owner_id) else None,
    )


def list_profiles(context: AppContext) -> list[ProfileView]:
    """What was measured, newest first: of this machine, and of what it was with other GPUs or drives."""
    from lohan.hardware.profile_files import facts_of_device, read_profile  # as in `hardware.service`

    facts = context.hardware.facts()
    mine = {facts_of_device(facts, uuid).digest for uuid in (None, *(gpu.uuid for gpu in facts.gpus))}
    names = base_models_service.names_by_workload(context)
    found = []
    for path in sorted(context.settings.profiles_folder.glob("*.json")):
        try:
            profile = read_profile(path)
        except ConfigError as error:
            found.append(ProfileView(fingerprint=path.stem, is_this_machine=path.stem in mine, problem=error.to_dict()))
            continue
        if profile is not None:
            models = list(dict.fromkeys(names.get(block.workload_digest, block.workload_digest[:12]) for block in profile.blocks))
            found.append(
                ProfileView(
                    fingerprint=profile.fingerprint,
                    is_this_machine=profile.fingerprint in mine,
                    date=profile.date,
                    device=profile.device,
                    models=models,
                )
            )
    return sorted(found, key=lambda view: view.date or "", reverse=True)
