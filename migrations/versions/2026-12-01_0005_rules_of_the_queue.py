"""What the queue's rules go by: priority, place in line, space by directory, the plan a run began with, and time on devices.

Revision: 0005
Follows: 0004
Made: 2026-12-01 05:10:00.000000
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

ACTIVE = "('starting', 'running', 'pausing', 'cancelling')"


def upgrade() -> None:
    op.add_column("runs", sa.Column("started_plan", sa.JSON(), nullable=True))
    op.add_column("runs", sa.Column("corrected_step_seconds", sa.Double(), nullable=True))
    op.add_column("runs", sa.Column("priority", sa.Integer(), server_default="0", nullable=False))
    op.add_column("runs", sa.Column("queued_at", sa.DateTime(timezone=True), nullable=True))
    op.add_column("runs", sa.Column("reserved_directories", sa.JSON(), nullable=True))
    op.create_table(
        "device_uses",
        sa.Column("run_id", sa.String(length=48), nullable=False),
        sa.Column("began_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("devices", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_device_uses_run_id_runs", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "began_at", name="pk_device_uses"),
    )
    op.execute("UPDATE runs SET queued_at = created_at WHERE state <> 'draft'")
    # Of what ran before this was noted, the first start and the last sign of life are known: pauses in between count as time on a device.
    op.execute(
        f"""
        INSERT INTO device_uses (run_id, began_at, ended_at, devices)
        SELECT id, started_at, CASE WHEN state IN {ACTIVE} THEN NULL ELSE coalesce(finished_at, heartbeat_at, started_at) END, 1
        FROM runs WHERE started_at IS NOT NULL
        """  # noqa: S608
    )


def downgrade() -> None:
    op.drop_table("device_uses")
    for name in ("reserved_directories", "queued_at", "priority", "corrected_step_seconds", "started_plan"):
        op.drop_column("runs", name)
