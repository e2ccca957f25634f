"""pytest for the conformance suites; one sentence where what they need is not installed."""

from __future__ import annotations

try:
    import pytest
    import pytest_asyncio
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"the conformance suites need {error.name}; install it with `pip install 'lightningrl[testing]'`",
        name=error.name,
    ) from error

__all__ = ["pytest", "pytest_asyncio"]
