"""What the tests of all packages share: no client reads certificates."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from sizes import LONG


@pytest.fixture(scope="session", autouse=True)
def certificates() -> Iterator[Mapping[str, str]]:
    """Where this machine's certificates are, in environment variables, for whoever installs from the network.

    Everybody else speaks plain HTTP to this machine, and finds an empty folder of certificates: to read hundreds of them takes each client
    of each test, agent and judge tens of milliseconds. With `--long` they are read, as users' clients do.
    """
    found = {name: os.environ[name] for name in ("SSL_CERT_FILE", "SSL_CERT_DIR") if name in os.environ}
    if LONG in os.environ:
        yield found
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SSL_CERT_FILE", raising=False)
        patch.setenv("SSL_CERT_DIR", str(Path(__file__).parent))
        yield found
