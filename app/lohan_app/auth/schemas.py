"""What the API takes and gives about accounts."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field

from lohan_app.entities import Role
from lohan_app.text import display_name

DisplayName = Annotated[str, Field(min_length=1, max_length=255), AfterValidator(display_name)]
"""A name that people gave something: shown, never used as a path."""


class Scope(StrEnum):
    """What an API key may do."""

    READ = "read"
    """Look at everything its owner may see."""
    DATASETS = "datasets"
    """Upload and delete datasets."""
    RUNS = "runs"
    """Plan, submit and cancel runs."""
    ADMIN = "admin"
    """Everything its owner may do, keys included; only administrators can grant it."""


MEMBER_SCOPES = frozenset({Scope.READ, Scope.DATASETS, Scope.RUNS})
ALL_SCOPES = MEMBER_SCOPES | {Scope.ADMIN}


@dataclass(frozen=True, slots=True)
class Identity:
    """Who makes this request, and what they may do. A browser session has all the scopes of its user's role."""

    user_id: str
    user_name: str
    role: Role
    scopes: frozenset[Scope]
    address: str = ""
    session_id: str | None = None
    """Set where the request came with a session cookie, None where it came with a key."""
    csrf_token: str | None = None
    """What forms of this session carry in their hidden field `csrf_token`."""
    key_id: str | None = None

    @property
    def is_admin(self) -> bool:
        return self.role is Role.ADMIN and Scope.ADMIN in self.scopes

    def may(self, scope: Scope) -> bool:
        return scope in self.scopes or Scope.ADMIN in self.scopes

    def may_see(self, owner_id: str) -> bool:
        """Members see their own things, administrators all."""
        return owner_id == self.user_id or self.is_admin


class _Reply(BaseModel):
    model_config = ConfigDict(from_attributes=True)


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class SetupRequest(_Body):
    token: Annotated[str, Field(max_length=200)]
    user_name: Annotated[str, Field(max_length=64)]
    password: Annotated[str, Field(max_length=1024)]


class LoginRequest(_Body):
    user_name: Annotated[str, Field(max_length=64)]
    password: Annotated[str, Field(max_length=1024)]


class UserView(_Reply):
    id: str
    name: str
    role: Role


class LoginReply(_Reply):
    """The session itself is in the cookie; `csrf_token` goes into the header `X-CSRF-Token` of every request that changes something."""

    user: UserView
    csrf_token: str


class SessionView(_Reply):
    id: str
    created_at: datetime
    last_seen_at: datetime
    user_agent: str
    is_current: bool = False


class ApiKeyRequest(_Body):
    name: Annotated[str, Field(min_length=1, max_length=100), AfterValidator(display_name)]
    scopes: Annotated[list[Scope], Field(min_length=1)] = [Scope.READ, Scope.DATASETS, Scope.RUNS]
    expires_at: AwareDatetime | None = None


class ApiKeyView(_Reply):
    id: str
    name: str
    scopes: list[Scope]
    created_at: datetime
    last_used_at: datetime | None
    expires_at: datetime | None


class NewApiKey(_Reply):
    """A key just made; `key` is shown this once."""

    key: str
    api_key: ApiKeyView
