"""Lists by cursor: a page of items and the id to continue after. Ids sort by the time they were made, so a page never shifts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Generic, TypeVar

from fastapi import Query
from pydantic import BaseModel

T = TypeVar("T")
R = TypeVar("R")

DEFAULT_LIMIT = 50
MAXIMUM_LIMIT = 200

After = Annotated[str | None, Query(max_length=64, description="The last page's `next_cursor`.")]
Limit = Annotated[int, Query(ge=1, le=MAXIMUM_LIMIT)]


class Page(BaseModel, Generic[T]):
    """`next_cursor` is null on the last page."""

    items: list[T]
    next_cursor: str | None = None


def make_page(rows: Sequence[R], limit: int, view: Callable[[R], T], cursor: Callable[[R], str]) -> Page[T]:
    """A page of at most `limit` of `rows`; ask the database for one row more than `limit`, which tells whether there is a next page."""
    shown = rows[:limit]
    return Page(items=[view(row) for row in shown], next_cursor=cursor(shown[-1]) if len(rows) > limit else None)
