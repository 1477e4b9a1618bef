"""A run's plan with what its first steps have corrected: another forecast, and what is kept now. Pure arithmetic."""

from __future__ import annotations

from lohan.planning.choice import Choice, Chooser
from lohan.planning.correction import Correction
from lohan.planning.plan import Plan
from lohan.planning.prices import foresee
from lohan.planning.search import Chosen


def corrected_plan(plan: Plan, correction: Correction, *, retention_changed: bool) -> Plan:
    """`plan` as it is followed from now on.

    Args:
        retention_changed: whether the better decision is followed.
    """
    running = correction.running
    fit, micro_batch, kept_units = running.fit, running.micro_batch, running.kept_units
    better = correction.better if retention_changed else None
    choice = better or Choice(fit, micro_batch, kept_units, running.decision)
    alternatives = plan.forecast.alternatives if plan.forecast is not None else ()
    chooser = Chooser(fit, running.profile, running.policy)
    foreseen = foresee(Chosen(choice, choice, (choice,), alternatives), chooser, running.profile)
    if better is None and plan.forecast is not None:
        foreseen = foreseen.model_copy(update={"case": plan.forecast.case, "is_memory_bound": plan.forecast.is_memory_bound})
    retention = choice.decision.retention
    swapped = fit.kept_on_drives(retention, micro_batch) - fit.kept_on_drives(plan.retention, micro_batch)
    return plan.model_copy(
        update={
            "retention": retention,
            "tiers": fit.tiers(micro_batch, kept_units, retention),
            "ssd_bytes_per_step": plan.ssd_bytes_per_step + 2 * swapped,
            "ssd_bytes_written_per_step": plan.ssd_bytes_written_per_step + swapped,
            "forecast": foreseen,
        }
    )
