"""Passwords: hashing with a bound on memory, the rules for new ones, and the back-off after wrong ones."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from pwdlib import PasswordHash
from pwdlib.exceptions import PwdlibError

from lohan_app.errors import TooManyRequests, Unavailable, Unprocessable

# Argon2id with pwdlib's parameters takes 64 MiB and tens of milliseconds; two at once bound what a flood of logins costs.
PARALLEL_HASHES = 2
HASH_WAIT_SECONDS = 5.0
MINIMUM_PASSWORD_CHARACTERS = 8
# Far above any passphrase; a hash over megabytes would be a cheap way to keep the processor busy.
MAXIMUM_PASSWORD_CHARACTERS = 256
# The most used of the leaked passwords that are long enough to pass the length rule.
# fmt: off
COMMON_PASSWORDS = frozenset({
    "password", "password1", "password123", "passw0rd", "12345678", "123456789", "1234567890", "12341234", "11111111", "00000000",
    "87654321", "qwertyui", "qwertyuiop", "qwerty123", "1q2w3e4r", "1qaz2wsx", "asdfghjkl", "iloveyou", "sunshine", "princess",
    "football", "baseball", "superman", "trustno1", "letmein1", "welcome1", "abcd1234", "abc12345", "changeme", "administrator",
})
# fmt: on
# A password field that no password matches: the account exists for its API keys alone.
NO_PASSWORD = "!"  # noqa: S105 - the absence of a password


class PasswordHasher:
    """Hashes and checks passwords, at most `PARALLEL_HASHES` at once. Thread-safe; blocks, so call it from a worker thread."""

    def __init__(self) -> None:
        self._hash = PasswordHash.recommended()
        self._slots = threading.BoundedSemaphore(PARALLEL_HASHES)

    def hash(self, password: str) -> str:
        with _Slot(self._slots):
            return self._hash.hash(password)

    def matches(self, password: str, stored: str | None) -> bool:
        """Whether `password` is the one behind `stored`; None (no such user) costs the same time and is never true."""
        usable = stored is not None and stored != NO_PASSWORD and len(password) <= MAXIMUM_PASSWORD_CHARACTERS
        with _Slot(self._slots):
            dummy = _dummy_hash()
            try:
                same = self._hash.verify(password[:MAXIMUM_PASSWORD_CHARACTERS], stored if usable and stored else dummy)
            except PwdlibError:
                return False
        return usable and same


@cache
def _dummy_hash() -> str:
    """What the password of an unknown user is compared with, so that the reply takes as long as for a known one."""
    return PasswordHash.recommended().hash("no user has this password")


class _Slot:
    """One of the hasher's slots, or a 503 when none came free in time."""

    def __init__(self, slots: threading.BoundedSemaphore) -> None:
        self._slots = slots

    def __enter__(self) -> None:
        if not self._slots.acquire(timeout=HASH_WAIT_SECONDS):
            raise Unavailable("too many logins at once", remedy="Try again in a few seconds.", headers={"Retry-After": "5"})

    def __exit__(self, *_: object) -> None:
        self._slots.release()


def check_new_password(password: str, *, user_name: str) -> None:
    """Refuse a password that would be guessed first.

    Raises:
        Unprocessable: too short, too long, the user's name, or one of the most used passwords.
    """
    remedy = f"Use {MINIMUM_PASSWORD_CHARACTERS} to {MAXIMUM_PASSWORD_CHARACTERS} characters; a few unrelated words are best."
    if not MINIMUM_PASSWORD_CHARACTERS <= len(password) <= MAXIMUM_PASSWORD_CHARACTERS:
        raise Unprocessable(f"the password has {len(password)} characters", place="password", remedy=remedy)
    if password.lower() in COMMON_PASSWORDS or password.lower() == user_name.lower():
        raise Unprocessable("the password is one that would be tried first", place="password", remedy=remedy)


@dataclass(slots=True)
class _Failures:
    count: int = 0
    blocked_until: float = 0.0


class LoginBackoff:
    """Makes repeated wrong guesses wait, per account and per address: 1 s after the fifth, doubling to 60 s. Thread-safe.

    Kept in memory: a restart forgives, and nobody is ever locked out for good (`lohan admin reset-password` is the way back in).
    """

    FREE_FAILURES = 5
    LONGEST_WAIT_SECONDS = 60.0
    # A flood of made-up accounts pushes the oldest entries out and cannot grow the process.
    REMEMBERED = 10_000

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures: OrderedDict[str, _Failures] = OrderedDict()
        self._lock = threading.Lock()

    def check(self, *keys: str) -> None:
        """Raise TooManyRequests while one of `keys` has to wait."""
        with self._lock:
            wait = max((self._failures[key].blocked_until - self._clock() for key in keys if key in self._failures), default=0.0)
        if wait > 0:
            seconds = int(wait) + 1
            raise TooManyRequests("too many wrong passwords", remedy=f"Try again in {seconds} s.", headers={"Retry-After": str(seconds)})

    def failed(self, *keys: str) -> None:
        """Count a wrong guess against `keys`."""
        with self._lock:
            for key in keys:
                failures = self._failures.setdefault(key, _Failures())
                self._failures.move_to_end(key)
                failures.count += 1
                doublings = failures.count - self.FREE_FAILURES
                if doublings >= 0:
                    # Past 2^6 the cap decides; the bound keeps the power small however many guesses came.
                    failures.blocked_until = self._clock() + min(2.0 ** min(doublings, 6), self.LONGEST_WAIT_SECONDS)
            while len(self._failures) > self.REMEMBERED:
                self._failures.popitem(last=False)

    def succeeded(self, *keys: str) -> None:
        """Forget the wrong guesses of `keys`."""
        with self._lock:
            for key in keys:
                self._failures.pop(key, None)
