"""Keys and addresses that a user brings: read and checked in one place, kept out of recipes and of agents.

environment ─► read_key ─► the key alone, or a sentence that names its variable
recipe ─► Address, Variable: no user, no password and no key stands in either
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Final
from urllib.parse import unquote_plus, urlsplit

from pydantic import AfterValidator

from lightningrl.errors import ConfigError

__all__ = ["Address", "Endpoint", "Variable", "check_address", "check_key", "names_secret", "read_key"]

_CARRIED: Final = re.compile(r"[!-~]([ -~\t]*[!-~])?")
"""A value that an HTTP header can carry, by every client."""
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LOOKS_LIKE_KEY: Final = re.compile(r"(?=.*[a-z])(?=.*[0-9]).{20,}")
_SECRET_NAME: Final = re.compile(
    r"(.*(key|token|secret|password|passwd|passphrase|signature|credentials?)"
    r"|pass|pwd|auth|authorization|sig|sas|jwt|bearer|code)"
)
_KEY: Final = re.compile(
    r"([sr]k_|gsk_|c?sk-|xai-|pplx-|nvapi-|hf_|r8_|AIza|ya29\.|AKIA|ASIA|gh[a-z]_|github_pat_|glpat-|eyJ)[\w.~-]{12,}"
    r"|(?=.*[a-z])(?=.*[A-Z])(?=(.*[0-9]){4})\w{28,}"
)
"""A part of an address that can only be a key: by its issuer's prefix, or by length and mixture. No hexadecimal id."""


def read_key(variable: str, environment: Mapping[str, str], *, where: str, what: str = "the provider's key") -> str:
    """The key in an environment variable, less the white space around it, which a file's last line leaves there. Raises
    ConfigError with the variable's name, and never with its value."""
    key = environment.get(variable, "").strip()
    if not key:
        raise ConfigError(f"{where}: the environment variable {variable!r} is not set; set it to {what}")
    return check_key(key, f"{where}: the environment variable {variable!r}")


def check_key(key: str, where: str) -> str:
    """The key less the white space around it. Raises ConfigError where no HTTP header can carry it; `where` names
    it."""
    key = key.strip()
    if _CARRIED.fullmatch(key) is None:
        raise ConfigError(
            f"{where} holds what no HTTP header can carry: a line break, a control character, a letter that is not "
            "ASCII, or nothing; set it to the key alone"
        )
    return key


def names_secret(name: str) -> bool:
    """True for a parameter of an address that has a secret for its value."""
    return _SECRET_NAME.fullmatch(re.sub(r"[^a-z]", "", name.lower())) is not None


def check_address(url: str) -> str:
    """The address. Raises ValueError where it is none of HTTP, or names a user, a password or a key."""
    if re.match(r"https?://[^/?#]", url) is None:
        raise ValueError(
            "write an address that begins with 'http://' or 'https://', for example 'https://api.openai.com/v1'"
        )
    return check_no_secret(url)


def check_no_secret(url: str) -> str:
    """The address, or the bare host. Raises ValueError where it names a user, a password or a key: a recipe is copied
    and shown."""
    why = "and a recipe is copied into its run folder and shown; "
    why += "leave it out, and put the key into an environment variable"
    try:
        parts = urlsplit(url if "//" in url else f"//{url}")
        pairs = [
            *re.split("[&;]", f"{parts.query}&{parts.fragment}"),
            *(part for part in re.split("[/;]", parts.path) if "=" in part),
        ]
        names = [unquote_plus(pair.partition("=")[0]) for pair in pairs]
        values = [unquote_plus(part) for part in re.split("[/&;=]", f"{parts.path}&{parts.query}&{parts.fragment}")]
    except ValueError:
        raise ValueError("it is no address; write for example 'https://api.openai.com/v1'") from None
    if "@" in parts.netloc:
        raise ValueError(f"the address names a user or a password, {why}")
    if secret := next(filter(names_secret, names), None):
        raise ValueError(f"the address has a secret behind {secret!r}, {why}")
    if any(map(_KEY.fullmatch, values)):
        raise ValueError(f"the address has what looks like a key in its path or query, {why}")
    return url


def _check_variable(name: str) -> str:
    if _VARIABLE.fullmatch(name) is None or _LOOKS_LIKE_KEY.fullmatch(name):
        raise ValueError(
            "write the name of an environment variable that has the key, for example 'OPENAI_API_KEY'; no key stands "
            "in a recipe"
        )
    return name


Address = Annotated[str, AfterValidator(check_address)]
"""Address of a foreign server, in a recipe."""
Endpoint = Annotated[str, AfterValidator(check_no_secret)]
"""The same, or a bare host."""
Variable = Annotated[str, AfterValidator(_check_variable)]
"""Name of the environment variable that has a secret."""
