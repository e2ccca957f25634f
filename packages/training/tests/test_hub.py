"""What cannot be sent to the hub is refused in one sentence, before anything is loaded."""

from __future__ import annotations

import pytest

from lightningrl.errors import ConfigError
from lightningrl_training.export import check_upload


@pytest.mark.parametrize("name", ["nonsense", "a/b/c", "me/"])
def test_a_name_that_is_no_place_of_the_hub_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"names no place of the hub; write OWNER/NAME"):
        check_upload(name)


def test_a_machine_kept_from_the_hub_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE keeps this machine from the hub"):
        check_upload("me/mine")


def test_a_machine_without_a_token_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(ConfigError, match=r"no token of the hub; log in with `hf auth login`"):
        check_upload("me/mine")
