"""All ten numbers of a step, and a summary of 32 steps a row that curves of long runs are made from.

Revision: 0004
Follows: 0003
Made: 2026-12-01 02:50:12.402911
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

# As of this revision. Steps of before have nothing in the four new columns.
STEPS = 32
SUM_LIMIT = 1e290
FILLED = ("loss", "learning_rate", "gradient_norm", "tokens", "tokens_per_second", "step_seconds")
EMPTY = ("epoch", "clip_rate", "device_peak_bytes", "host_bytes")


def upgrade() -> None:
    op.add_column("run_metrics", sa.Column("epoch", sa.Double(), nullable=True))
    op.add_column("run_metrics", sa.Column("clip_rate", sa.Double(), nullable=True))
    op.add_column("run_metrics", sa.Column("device_peak_bytes", sa.BigInteger(), nullable=True))
    op.add_column("run_metrics", sa.Column("host_bytes", sa.BigInteger(), nullable=True))
    op.create_table(
        "run_curves",
        sa.Column("run_id", sa.String(length=48), nullable=False),
        sa.Column("metric", sa.String(length=32), nullable=False),
        sa.Column("bucket", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("first_step", sa.Integer(), nullable=False),
        sa.Column("last_step", sa.Integer(), nullable=False),
        sa.Column("steps", sa.Integer(), nullable=False),
        sa.Column("finite_steps", sa.Integer(), nullable=False),
        sa.Column("total", sa.Double(), nullable=True),
        sa.Column("first_value", sa.Double(), nullable=True),
        sa.Column("last_value", sa.Double(), nullable=True),
        sa.Column("minimum", sa.Double(), nullable=True),
        sa.Column("minimum_step", sa.Integer(), nullable=True),
        sa.Column("maximum", sa.Double(), nullable=True),
        sa.Column("maximum_step", sa.Integer(), nullable=True),
        sa.Column("gap_step", sa.Integer(), nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_run_curves_run_id_runs", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "metric", "bucket", name="pk_run_curves"),
    )
    for metric in FILLED + EMPTY:
        op.execute(_summary(metric))


def _summary(metric: str) -> str:
    """Every run's steps of one number, 64 to a row. The names are the constants above."""
    return f"""
        INSERT INTO run_curves
        WITH points AS (
            SELECT run_id, step / {STEPS} AS bucket, step, CAST({metric} AS double precision) AS number FROM run_metrics
        ), whole AS (
            SELECT run_id, bucket, min(step) AS first_step, max(step) AS last_step, count(*) AS steps, count(number) AS finite_steps,
                sum(CASE WHEN number > {SUM_LIMIT} THEN {SUM_LIMIT} WHEN number < -{SUM_LIMIT} THEN -{SUM_LIMIT} ELSE number END) AS total,
                min(number) AS minimum, max(number) AS maximum, min(CASE WHEN number IS NULL THEN step END) AS gap_step
            FROM points GROUP BY run_id, bucket
        )
        SELECT whole.run_id, '{metric}', whole.bucket, first_step, last_step, steps, finite_steps, total,
            max(CASE WHEN step = first_step THEN number END), max(CASE WHEN step = last_step THEN number END),
            minimum, min(CASE WHEN number = minimum THEN step END), maximum, min(CASE WHEN number = maximum THEN step END), gap_step
        FROM whole JOIN points ON points.run_id = whole.run_id AND points.bucket = whole.bucket
        GROUP BY whole.run_id, whole.bucket, first_step, last_step, steps, finite_steps, total, minimum, maximum, gap_step
    """  # noqa: S608


def downgrade() -> None:
    op.drop_table("run_curves")
    for name in ("host_bytes", "device_peak_bytes", "clip_rate", "epoch"):
        op.drop_column("run_metrics", name)
