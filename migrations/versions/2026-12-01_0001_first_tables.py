"""Make all tables.

Revision: 0001
Follows: nothing
Made: 2026-12-01 13:20:08.776442
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

# In the order in which they can be made: what is referred to is there.
TABLES = (
    "users",
    "api_keys",
    "browser_sessions",
    "audit_entries",
    "idempotency_keys",
    "setup_claims",
    "base_models",
    "datasets",
    "dataset_row_errors",
    "runs",
    "device_uses",
    "run_events",
    "run_metrics",
    "run_curves",
)


def upgrade() -> None:
    _users()
    _requests()
    _models_and_datasets()
    _runs()
    _devices_and_events()
    _numbers()


def downgrade() -> None:
    """Everything goes."""
    for table in reversed(TABLES):
        op.drop_table(table)


def _users() -> None:
    op.create_table(
        "users",
        sa.Column("id", sa.String(length=48), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("password_hash", sa.String(length=255), nullable=False),
        sa.Column("role", sa.String(length=32), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_users")),
        sa.UniqueConstraint("name", name=op.f("uq_users_name")),
    )
    op.create_table(
        "api_keys",
        sa.Column("id", sa.String(length=48), nullable=False),
        sa.Column("user_id", sa.String(length=48), nullable=False),
        sa.Column("name", sa.String(length=100), nullable=False),
        sa.Column("secret_hash", sa.String(length=64), nullable=False),
        sa.Column("scopes", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("last_used_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("revoked_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name=op.f("fk_api_keys_user_id_users"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_api_keys")),
    )
    op.create_index(op.f("ix_api_keys_user_id"), "api_keys", ["user_id"], unique=False)
    op.create_table(
        "browser_sessions",
        sa.Column("id", sa.String(length=48), nullable=False),
        sa.Column("token_hash", sa.String(length=64), nullable=False),
        sa.Column("csrf_token", sa.String(length=64), nullable=False),
        sa.Column("user_id", sa.String(length=48), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("last_seen_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("user_agent", sa.String(length=255), nullable=False),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name=op.f("fk_browser_sessions_user_id_users"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_browser_sessions")),
        sa.UniqueConstraint("token_hash", name=op.f("uq_browser_sessions_token_hash")),
    )
    op.create_index(op.f("ix_browser_sessions_user_id"), "browser_sessions", ["user_id"], unique=False)


def _requests() -> None:
    op.create_table(
        "audit_entries",
        sa.Column("id", sa.String(length=48), nullable=False),
        sa.Column("time", sa.DateTime(timezone=True), nullable=False),
        sa.Column("user_id", sa.String(length=48), nullable=True),
        sa.Column("action", sa.String(length=64), nullable=False),
        sa.Column("subject", sa.String(length=255), nullable=False),
        sa.Column("address", sa.String(length=64), nullable=False),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name=op.f("fk_audit_entries_user_id_users")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_audit_entries")),
    )
    op.create_index(op.f("ix_audit_entries_time"), "audit_entries", ["time"], unique=False)
    op.create_table(
        "idempotency_keys",
        sa.Column("user_id", sa.String(length=48), nullable=False),
        sa.Column("key", sa.String(length=255), nullable=False),
        sa.Column("body_hash", sa.String(length=64), nullable=False),
        sa.Column("status_code", sa.Integer(), nullable=False),
        sa.Column("reply", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("location", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name=op.f("fk_idempotency_keys_user_id_users"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("user_id", "key", name=op.f("pk_idempotency_keys")),
    )
    op.create_table(
        "setup_claims",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("user_id", sa.String(length=48), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name=op.f("fk_setup_claims_user_id_users")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_setup_claims")),
    )


def _models_and_datasets() -> None:
    op.create_table(
        "base_models",
        sa.Column("id", sa.String(length=48), nullable=False),
        sa.Column("name", sa.String(length=255), nullable=False),
        sa.Column("source", sa.String(length=32), nullable=False),
        sa.Column("root", sa.String(length=4096), nullable=False),
        sa.Column("path_in_root", sa.String(length=4096), nullable=False),
        sa.Column("state", sa.String(length=32), nullable=False),
        sa.Column("architecture", sa.String(length=100), nullable=False),
        sa.Column("parameters", sa.BigInteger(), nullable=False),
        sa.Column("context_length", sa.Integer(), nullable=False),
        sa.Column("workload", sa.JSON(), nullable=True),
        sa.Column("problem", sa.JSON(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("deleted_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_base_models")),
    )
    op.create_index(
        "uq_base_models_name",
        "base_models",
        ["name"],
        unique=True,
        sqlite_where=sa.text("deleted_at IS NULL"),
        postgresql_where=sa.text("deleted_at IS NULL"),
    )
    op.create_table(
        "datasets",
        sa.Column("id", sa.String(length=48), nullable=False),
        sa.Column("owner_id", sa.String(length=48), nullable=False),
        sa.Column("name", sa.String(length=255), nullable=False),
        sa.Column("state", sa.String(length=32), nullable=False),
        sa.Column("format", sa.String(length=32), nullable=True),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("row_count", sa.Integer(), nullable=False),
        sa.Column("bad_row_count", sa.Integer(), nullable=False),
        sa.Column("problem", sa.JSON(), nullable=True),
        sa.Column("preview", sa.JSON(), nullable=True),
        sa.Column("progress", sa.Double(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("validated_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("deleted_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["owner_id"], ["users.id"], name=op.f("fk_datasets_owner_id_users")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_datasets")),
    )
    op.create_index(op.f("ix_datasets_owner_id"), "datasets", ["owner_id"], unique=False)
    op.create_table(
        "dataset_row_errors",
        sa.Column("dataset_id", sa.String(length=48), nullable=False),
        sa.Column("line", sa.Integer(), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("excerpt", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["dataset_id"], ["datasets.id"], name=op.f("fk_dataset_row_errors_dataset_id_datasets"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("dataset_id", "line", name=op.f("pk_dataset_row_errors")),
    )


def _runs() -> None:
    op.create_table(
        "runs",
        sa.Column("id", sa.String(length=48), nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("owner_id", sa.String(length=48), nullable=False),
        sa.Column("parent_id", sa.String(length=48), nullable=True),
        sa.Column("name", sa.String(length=255), nullable=False),
        sa.Column("base_model_id", sa.String(length=48), nullable=True),
        sa.Column("dataset_id", sa.String(length=48), nullable=True),
        sa.Column("skip_bad_rows", sa.Boolean(), nullable=False),
        sa.Column("settings", sa.JSON(), nullable=False),
        sa.Column("plan", sa.JSON(), nullable=True),
        sa.Column("started_plan", sa.JSON(), nullable=True),
        sa.Column("corrected_step_seconds", sa.Double(), nullable=True),
        sa.Column("priority", sa.Integer(), server_default="0", nullable=False),
        sa.Column("queued_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("wanted", sa.String(length=32), nullable=False),
        sa.Column("state", sa.String(length=32), nullable=False),
        sa.Column("state_reason", sa.Text(), nullable=False),
        sa.Column("problem", sa.JSON(), nullable=True),
        sa.Column("pause_cause", sa.String(length=32), nullable=True),
        sa.Column("start_after", sa.DateTime(timezone=True), nullable=True),
        sa.Column("kill_attempt", sa.Integer(), nullable=True),
        sa.Column("prepared_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("devices", sa.JSON(), nullable=False),
        sa.Column("reserved_ram_bytes", sa.BigInteger(), nullable=False),
        sa.Column("reserved_ssd_bytes", sa.BigInteger(), nullable=False),
        sa.Column("reserved_directories", sa.JSON(), nullable=True),
        sa.Column("events_offset_bytes", sa.BigInteger(), nullable=False),
        sa.Column("malformed_events", sa.Integer(), nullable=False),
        sa.Column("phase", sa.String(length=32), nullable=False),
        sa.Column("phase_progress", sa.Double(), nullable=True),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("total_steps", sa.Integer(), nullable=False),
        sa.Column("resumed_step", sa.Integer(), nullable=True),
        sa.Column("loss", sa.Double(), nullable=True),
        sa.Column("first_loss", sa.Double(), nullable=True),
        sa.Column("last_loss", sa.Double(), nullable=True),
        sa.Column("stopped_step", sa.Integer(), nullable=True),
        sa.Column("eta_seconds", sa.Double(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("deleted_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("heartbeat_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("kind <> 'chat' OR parent_id IS NOT NULL", name=op.f("ck_runs_chat_has_parent")),
        sa.CheckConstraint(
            "kind <> 'export' OR (base_model_id IS NOT NULL AND parent_id IS NOT NULL)", name=op.f("ck_runs_export_has_model_and_parent")
        ),
        sa.CheckConstraint(
            "kind <> 'train' OR (base_model_id IS NOT NULL AND dataset_id IS NOT NULL)", name=op.f("ck_runs_training_has_model_and_data")
        ),
        sa.ForeignKeyConstraint(["base_model_id"], ["base_models.id"], name=op.f("fk_runs_base_model_id_base_models")),
        sa.ForeignKeyConstraint(["dataset_id"], ["datasets.id"], name=op.f("fk_runs_dataset_id_datasets")),
        sa.ForeignKeyConstraint(["owner_id"], ["users.id"], name=op.f("fk_runs_owner_id_users")),
        sa.ForeignKeyConstraint(["parent_id"], ["runs.id"], name=op.f("fk_runs_parent_id_runs")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_runs")),
    )
    op.create_index(op.f("ix_runs_owner_id"), "runs", ["owner_id"], unique=False)
    op.create_index("ix_runs_state_created_at", "runs", ["state", "created_at"], unique=False)


def _devices_and_events() -> None:
    op.create_table(
        "device_uses",
        sa.Column("run_id", sa.String(length=48), nullable=False),
        sa.Column("began_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("devices", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_device_uses_run_id_runs"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "began_at", name=op.f("pk_device_uses")),
    )
    op.create_table(
        "run_events",
        sa.Column("run_id", sa.String(length=48), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.Column("time", sa.Double(), nullable=False),
        sa.Column("type", sa.String(length=32), nullable=False),
        sa.Column("fields", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_run_events_run_id_runs"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "attempt", "seq", name=op.f("pk_run_events")),
    )


def _numbers() -> None:
    op.create_table(
        "run_metrics",
        sa.Column("run_id", sa.String(length=48), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.Column("time", sa.Double(), nullable=False),
        sa.Column("loss", sa.Double(), nullable=True),
        sa.Column("learning_rate", sa.Double(), nullable=False),
        sa.Column("gradient_norm", sa.Double(), nullable=True),
        sa.Column("tokens", sa.Integer(), nullable=False),
        sa.Column("tokens_per_second", sa.Double(), nullable=True),
        sa.Column("step_seconds", sa.Double(), nullable=False),
        sa.Column("epoch", sa.Double(), nullable=True),
        sa.Column("clip_rate", sa.Double(), nullable=True),
        sa.Column("device_peak_bytes", sa.BigInteger(), nullable=True),
        sa.Column("host_bytes", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_run_metrics_run_id_runs"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "step", name=op.f("pk_run_metrics")),
    )
    op.create_index("ix_run_metrics_run_id_attempt_seq", "run_metrics", ["run_id", "attempt", "seq"], unique=False)
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
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_run_curves_run_id_runs"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "metric", "bucket", name=op.f("pk_run_curves")),
    )
