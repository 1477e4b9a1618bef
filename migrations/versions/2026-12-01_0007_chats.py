"""A chat is of the run whose result it asks.

Revision: 0007
Follows: 0006
Made: 2026-12-01 12:14:00.000000
"""

from __future__ import annotations

from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

NAME = "ck_runs_chat_has_parent"


def upgrade() -> None:
    with op.batch_alter_table("runs") as batch:
        batch.create_check_constraint(op.f(NAME), "kind <> 'chat' OR parent_id IS NOT NULL")


def downgrade() -> None:
    """Chats go: the version before does not know them."""
    for table in ("run_events", "run_metrics", "run_curves", "device_uses"):
        op.execute(f"DELETE FROM {table} WHERE run_id IN (SELECT id FROM runs WHERE kind = 'chat')")  # noqa: S608 - constants
    op.execute("DELETE FROM runs WHERE kind = 'chat'")
    with op.batch_alter_table("runs") as batch:
        batch.drop_constraint(op.f(NAME), type_="check")
