"""Sends what was exported to the Hugging Face hub: asked first, while nothing heavy was made yet."""

from __future__ import annotations

from pathlib import Path

from lightningrl.errors import ConfigError

__all__ = ["check_upload", "upload"]


def check_upload(name: str) -> None:
    """Raise ConfigError where this machine cannot write to `name`, OWNER/NAME, of the hub: a name that is none, no
    token, no network, no right."""
    from huggingface_hub import HfApi, constants, get_token
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        validate_repo_id(name if "/" in name else f"/{name}")
    except HFValidationError:
        raise ConfigError(f"{name!r} names no place of the hub; write OWNER/NAME, for example me/my-model") from None
    if constants.HF_HUB_OFFLINE:
        raise ConfigError(f"{name!r} cannot be sent: HF_HUB_OFFLINE keeps this machine from the hub; unset it")
    if get_token() is None:
        raise ConfigError(
            f"{name!r} cannot be sent: this machine has no token of the hub; log in with `hf auth login`, or set "
            "HF_TOKEN"
        )
    try:
        HfApi().whoami()
    except HfHubHTTPError as error:
        raise ConfigError(
            f"{name!r} cannot be sent: the hub does not take this machine's token "
            f"({' '.join(str(error).split())[:160]}); log in again with `hf auth login`"
        ) from None
    except Exception as error:  # noqa: BLE001  whatever its HTTP library raises where there is no network
        raise ConfigError(
            f"{name!r} cannot be sent: the hub does not answer ({' '.join(str(error).split())[:160]}); export without "
            "--push-to-hub, and send it later with `hf upload`"
        ) from None


def upload(name: str, place: Path) -> str:
    """Send a folder, or a file, to a repository of the hub, which is made where it is not there: for its owner alone.
    Returns its address. Raises ConfigError; what was written stays."""
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        address = str(api.create_repo(name, exist_ok=True, private=True))
        if place.is_dir():
            api.upload_folder(repo_id=name, folder_path=place)
        else:
            api.upload_file(repo_id=name, path_or_fileobj=place, path_in_repo=place.name)
    except Exception as error:  # noqa: BLE001  the hub's, its HTTP library's, the disk's
        raise ConfigError(
            f"{str(place)!r} was written but not sent to {name!r} ({' '.join(str(error).split())[:160]}); send it with "
            f"`hf upload {name} {place}`"
        ) from None
    return address
