"""Errors of a store. Each is a `StoreError`; the server maps them to HTTP statuses."""

from __future__ import annotations

from typing import Self

from lightningrl.errors import StoreError

__all__ = ["AttemptOver", "Conflict", "EmptyStore", "StoreFull", "StoreTrouble", "UnknownRecord"]


class UnknownRecord(StoreError):
    """No such rollout, attempt or transition. HTTP 404."""


class Conflict(StoreError):
    """A request contradicts what is stored: an id reused for another task, a rollout trained twice. HTTP 409."""


class AttemptOver(Conflict):
    """A call, tool call, reward or other result for an attempt that has ended. HTTP 409; counted as late."""


class EmptyStore(StoreError):
    """A database without tables, opened read-only: a store that is only being made, or was dropped."""


class StoreTrouble(StoreError):
    """Trouble of the database, not of a request: in use, unreadable, gone, read-only. HTTP 503: ask again."""


class StoreFull(StoreTrouble):
    """No room on the disk. Nothing of the request was kept; the store works again once there is room. HTTP 507."""

    @classmethod
    def of(cls, name: str) -> Self:
        """Make the error of the store `name`."""
        remedy = "nothing of this request was kept: free some space and repeat it"
        return cls(f"no room on the disk for the store {name!r}; {remedy}")
