"""What kind of work a run is; only a training run has both a base model and a dataset.

Revision: 0006
Follows: 0005
Made: 2026-12-01 05:02:18.663904
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

CHECKS = {
    "ck_runs_training_has_model_and_data": "kind <> 'train' OR (base_model_id IS NOT NULL AND dataset_id IS NOT NULL)",
    "ck_runs_export_has_model_and_parent": "kind <> 'export' OR (base_model_id IS NOT NULL AND parent_id IS NOT NULL)",
}
TEXT = sa.String(length=48)


def upgrade() -> None:
    op.add_column("runs", sa.Column("kind", sa.String(length=32), nullable=True))
    op.execute("UPDATE runs SET kind = 'train'")
    with op.batch_alter_table("runs") as batch:
        batch.alter_column("kind", existing_type=sa.String(length=32), nullable=False)
        batch.alter_column("base_model_id", existing_type=TEXT, nullable=True)
        batch.alter_column("dataset_id", existing_type=TEXT, nullable=True)
        for name, condition in CHECKS.items():
            batch.create_check_constraint(op.f(name), condition)


def downgrade() -> None:
    """Runs of other kinds go: the schema before has no place for them."""
    for table in ("run_events", "run_metrics", "run_curves", "device_uses"):
        op.execute(f"DELETE FROM {table} WHERE run_id IN (SELECT id FROM runs WHERE kind <> 'train')")  # noqa: S608 - constants
    op.execute("DELETE FROM runs WHERE kind <> 'train'")
    with op.batch_alter_table("runs") as batch:
        for name in CHECKS:
            batch.drop_constraint(op.f(name), type_="check")
        batch.alter_column("dataset_id", existing_type=TEXT, nullable=False)
        batch.alter_column("base_model_id", existing_type=TEXT, nullable=False)
        batch.drop_column("kind")
