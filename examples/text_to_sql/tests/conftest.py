"""The example's modules are plain files, as a user's are: put their folder on the path."""

import os
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(EXAMPLE))
os.environ.setdefault("OPENAI_API_KEY", "test")


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("text_to_sql")
