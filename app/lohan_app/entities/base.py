"""What all tables share: ids, times, JSON columns, enum columns stored as text."""

from __future__ import annotations

import secrets
import time
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, ClassVar

from sqlalchemy import JSON, DateTime, Double, Enum, MetaData, String, TypeDecorator
from sqlalchemy.orm import DeclarativeBase

# Constraint names that Alembic can find again on both databases.
NAMING_CONVENTION = {
    "ix": "ix_%(column_0_label)s",
    "uq": "uq_%(table_name)s_%(column_0_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}

Id = String(48)


class UtcDateTime(TypeDecorator[datetime]):
    """An aware UTC datetime; SQLite, which stores no zone, gives it back aware too."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Any) -> datetime | None:
        assert value is None or value.tzinfo is not None, "times are stored aware"
        return value

    def process_result_value(self, value: datetime | None, dialect: Any) -> datetime | None:
        return value.replace(tzinfo=UTC) if value is not None and value.tzinfo is None else value


class Entity(DeclarativeBase):
    """Base of all tables."""

    metadata = MetaData(naming_convention=NAMING_CONVENTION)
    type_annotation_map: ClassVar[dict[Any, Any]] = {dict[str, Any]: JSON, list[str]: JSON, datetime: UtcDateTime, float: Double}


def text_enum(enum: type[StrEnum]) -> Enum:
    """A column that stores the enum's value as text: a new member needs no change of a database type."""
    return Enum(enum, native_enum=False, create_constraint=False, length=32, values_callable=lambda members: [m.value for m in members])


def now() -> datetime:
    return datetime.now(UTC)


def new_id(prefix: str) -> str:
    """`<prefix>_` and a UUID of version 7 (RFC 9562 section 5.7) in hex: ids sort by the time they were made."""
    value = (time.time_ns() // 1_000_000) << 80 | secrets.randbits(80)
    value = value & ~(0xF << 76) | 0x7 << 76
    value = value & ~(0x3 << 62) | 0x2 << 62
    return f"{prefix}_{value:032x}"
