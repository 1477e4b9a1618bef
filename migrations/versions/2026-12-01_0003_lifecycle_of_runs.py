"""What pausing, stopping early, killing, waiting after a lost attempt and deleting note on a run.

Revision: 0003
Follows: 0002
Made: 2026-12-01 01:30:41.118035
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("runs", sa.Column("pause_cause", sa.String(length=32), nullable=True))
    op.add_column("runs", sa.Column("start_after", sa.DateTime(timezone=True), nullable=True))
    op.add_column("runs", sa.Column("kill_attempt", sa.Integer(), nullable=True))
    op.add_column("runs", sa.Column("stopped_step", sa.Integer(), nullable=True))
    op.add_column("runs", sa.Column("deleted_at", sa.DateTime(timezone=True), nullable=True))


def downgrade() -> None:
    for name in ("deleted_at", "stopped_step", "kill_attempt", "start_after", "pause_cause"):
        op.drop_column("runs", name)
