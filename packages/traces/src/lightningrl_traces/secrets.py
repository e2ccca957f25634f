"""Secrets and personal data in text: found by detect-secrets, phonenumbers and python-stdnum, and masked.

"mail ada@example.org, key AKIA…"  ─►  "mail [email], key [secret: AWS Access Key]"
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

import phonenumbers
from detect_secrets.plugins.artifactory import ArtifactoryDetector
from detect_secrets.plugins.aws import AWSKeyDetector
from detect_secrets.plugins.azure_storage_key import AzureStorageKeyDetector
from detect_secrets.plugins.basic_auth import BasicAuthDetector
from detect_secrets.plugins.discord import DiscordBotTokenDetector
from detect_secrets.plugins.github_token import GitHubTokenDetector
from detect_secrets.plugins.gitlab_token import GitLabTokenDetector
from detect_secrets.plugins.jwt import JwtTokenDetector
from detect_secrets.plugins.mailchimp import MailchimpDetector
from detect_secrets.plugins.npm import NpmDetector
from detect_secrets.plugins.openai import OpenAIDetector
from detect_secrets.plugins.pypi_token import PypiTokenDetector
from detect_secrets.plugins.sendgrid import SendGridDetector
from detect_secrets.plugins.slack import SlackDetector
from detect_secrets.plugins.square_oauth import SquareOAuthDetector
from detect_secrets.plugins.stripe import StripeDetector
from detect_secrets.plugins.telegram_token import TelegramBotTokenDetector
from detect_secrets.plugins.twilio import TwilioKeyDetector
from stdnum import iban, luhn

from lightningrl_server.lru import LruCache
from lightningrl_traces.grades import Reason
from lightningrl_traces.records import Call, Ending, ToolRun

__all__ = ["mask_call", "mask_ending", "mask_text", "mask_tool"]

_DETECTORS: Final = tuple(
    detector()
    for detector in (
        ArtifactoryDetector,
        AWSKeyDetector,
        AzureStorageKeyDetector,
        BasicAuthDetector,
        DiscordBotTokenDetector,
        GitHubTokenDetector,
        GitLabTokenDetector,
        JwtTokenDetector,
        MailchimpDetector,
        NpmDetector,
        OpenAIDetector,
        PypiTokenDetector,
        SendGridDetector,
        SlackDetector,
        SquareOAuthDetector,
        StripeDetector,
        TelegramBotTokenDetector,
        TwilioKeyDetector,
    )
)
"""Detectors of tokens that name their kind. Those by entropy take ids of calls and hashes for secrets."""
_PRIVATE_KEY: Final = re.compile(
    r"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----.*?"
    r"(?:-----END (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----|\Z)",
    re.DOTALL,
)
_OPENAI: Final = re.compile(r"\bsk-(?:ant-|proj-|svcacct-|or-v1-)?[A-Za-z0-9_-]{24,}\b")
"""Keys of model providers in their newer forms."""
_GOOGLE: Final = re.compile(r"\bAIza[0-9A-Za-z_-]{35}\b")
_HUB: Final = re.compile(r"\bhf_[A-Za-z0-9]{30,}\b")
_KEYS: Final = (
    ("-----BEGIN", "private key", _PRIVATE_KEY),
    ("sk-", "API key", _OPENAI),
    ("AIza", "API key", _GOOGLE),
    ("hf_", "API key", _HUB),
)
"""Keys by a text that each has."""
_EMAIL: Final = re.compile(r"\b[A-Za-z0-9._%+-]{1,64}@(?:[A-Za-z0-9-]{1,63}\.)+[A-Za-z]{2,24}\b")
_CARD: Final = re.compile(r"(?<![\d.])\d(?:[ -]?\d){12,18}(?![\d.])")
_IBAN: Final = re.compile(r"\b[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){3,7}(?: ?[A-Z0-9]{1,3})?\b")
_MAY_BE_SECRET: Final = re.compile(r"[A-Za-z0-9_/+=-]{16,}|://|-----")
_LONG: Final = 16_384
_ENTRY: Final = 250
_MEMORY: Final = 4 * 2**20
"""Characters of texts shorter than `_LONG`, and `_ENTRY` for each, whose masks are remembered: a call repeats those
before it."""
_remembered: Final = LruCache[str, tuple[str, bool, bool]](_MEMORY // _ENTRY, _LONG + _ENTRY, together=_MEMORY)


def mask_text(text: str) -> tuple[str, bool, bool]:
    """Return the text with what is secret or personal masked; whether it had a secret; whether personal data."""
    if len(text) >= _LONG:
        return _mask(text)
    return _remembered.get(text) or _remembered.put(text, _mask(text), len(text) + _ENTRY)


def _mask(text: str) -> tuple[str, bool, bool]:
    masked = text
    for sign, kind, pattern in _KEYS:
        if sign in masked:  # many times faster than the pattern
            masked = pattern.sub(f"[secret: {kind}]", masked)
    masked = "".join(_mask_line(line) for line in masked.splitlines(keepends=True))
    has_secret = masked != text
    private = _EMAIL.sub("[email]", masked) if "@" in masked else masked
    private = _CARD.sub(lambda match: "[card number]" if _is_card(match[0]) else match[0], private)
    private = _IBAN.sub(lambda match: "[IBAN]" if iban.is_valid(match[0]) else match[0], private)
    private = _mask_phones(private)
    return (text if private == text else private), has_secret, private != masked


def _mask_line(line: str) -> str:
    if _MAY_BE_SECRET.search(line) is None:
        return line
    for detector in _DETECTORS:
        for secret in detector.analyze_string(line):
            line = line.replace(secret, f"[secret: {detector.secret_type}]") if secret else line
    return line


def _is_card(text: str) -> bool:
    digits = re.sub(r"\D", "", text)
    return digits[0] in "3456" and len(set(digits)) > 1 and luhn.is_valid(digits)


def _mask_phones(text: str) -> str:
    if "+" not in text:
        return text
    for match in reversed(list(phonenumbers.PhoneNumberMatcher(text, None))):
        text = f"{text[: match.start]}[phone number]{text[match.end :]}"
    return text


class _Mask:
    """Masks the texts within values, and remembers what it came upon."""

    def __init__(self) -> None:
        self.has_secret = False
        self.has_personal = False

    def __call__(self, value: Any) -> Any:
        if isinstance(value, str):
            masked, secret, personal = mask_text(value)
            self.has_secret |= secret
            self.has_personal |= personal
            return masked
        if isinstance(value, Mapping):
            return {key: self(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self(inner) for inner in value]
        return value


def mask_call(call: Call) -> Call:
    """Mask a call's texts; its tokens, which say the same, are no data any more where anything was masked."""
    mask = _Mask()
    fields = {"tools", "messages", "answer"}
    masked = replace(call, **{name: mask(getattr(call, name)) for name in fields}, error=mask(call.error))
    return replace(masked, notes=(*call.notes, *_notes(mask)))


def _notes(mask: _Mask) -> Iterator[str]:
    if mask.has_secret:
        yield Reason.SECRET.value
    if mask.has_personal:
        yield Reason.PERSONAL.value


def mask_tool(tool: ToolRun) -> ToolRun:
    mask = _Mask()
    return replace(tool, arguments=mask(tool.arguments), result=mask(tool.result))


def mask_ending(ending: Ending) -> Ending:
    mask: Callable[[Any], Any] = _Mask()
    return replace(ending, input=mask(ending.input), output=mask(ending.output), error=mask(ending.error))
