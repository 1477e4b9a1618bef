"""Note from which step a run's trainer was resumed.

Revision: 0002
Follows: 0001
Made: 2026-11-30 04:08:12.402113
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("runs", sa.Column("resumed_step", sa.Integer(), nullable=True))


def downgrade() -> None:
    op.drop_column("runs", "resumed_step")
