"""Rules that find personal data in text, each linear in its length: addresses, cards, accounts, phone numbers by region
and numbers of persons by their check digits, as phonenumbers and python-stdnum know them."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from typing import Any, Final

import phonenumbers
from stdnum import iban, luhn

__all__ = ["mask_personal"]

_EMAIL: Final = re.compile(
    r"(?<![\w%+-])[\w.%+-]{1,64}(?:@|%40|＠)(?:[\w-]{1,63}\.){1,8}(?:xn--[\w-]{2,59}|[^\W\d_]{2,24})(?![\w-])"
)
_CARD: Final = re.compile(
    r"(?<![\w.])(?:\d(?:[ \u00a0-]?\d){12,18}"
    r"|\d{4}([./\u2013\u2011])\d{4}\1\d{4}\1\d{1,7}|\d{4}([./])\d{6}\2\d{5})(?!\w|\.\d)"
)
_IBAN: Final = re.compile(r"(?<![A-Za-z0-9])[A-Za-z]{2}\d{2}(?:[ -]?[A-Za-z0-9]{4}){2,7}(?:[ -]?[A-Za-z0-9]{1,3})?")
_IP: Final = re.compile(
    r"(?<![\w.:-])(?:(?:\d{1,3}\.){3}\d{1,3}(?!\w|\.\d)"
    r"|(?:[0-9A-Fa-f]{0,4}:){2,7}[0-9A-Fa-f]{1,4}(?![\w:]|\.\d))"
)
_MAC: Final = re.compile(r"(?<![\w:-])[0-9A-Fa-f]{2}(?:([:-])[0-9A-Fa-f]{2})(?:\1[0-9A-Fa-f]{2}){4}(?![\w:-])")
_SSN: Final = re.compile(r"(?<![\w.-])\d{3}([- ])\d{2}\1\d{4}(?![\w-]|\.\d)")
_NINO: Final = re.compile(
    r"(?<![A-Za-z0-9])[A-CEGHJ-PR-TW-Z][A-CEGHJ-NPR-TW-Z] ?\d{2} ?\d{2} ?\d{2} ?[A-D](?![A-Za-z0-9])", re.IGNORECASE
)
_NAMED: Final = re.compile(
    r"(?P<kind>ssn|social security|national insurance|passport|pass(?:port)?nummer|reisepass|passeport"
    r"|(?:personal)?ausweis|driver'?s? licen[cs]e|identity card|tax id|steuer-?id|date of birth|\bdob\b|(?<=\W)born"
    r"|phone|telephone|\btel\b|mobile|\bcell\b|\bfax|whatsapp|handy|telefon)"
    r"(?:[^\w\n]|number|nummer|no|nr|is|was|ist|on|am){0,8}?"
    r"(?P<value>\+?\(?(?<![A-Za-z0-9])[A-Za-z]{0,3}\d[\dA-Za-z() ./-]{4,17}[\dA-Za-z])(?![A-Za-z0-9])",
    re.IGNORECASE,
)
_NAMED_SIGNS: Final = (
    *("ssn", "social", "insurance", "pass", "ausweis", "licen", "identity", "tax", "steuer", "birth", "dob", "born"),
    *("phone", "tel", "mobile", "cell", "fax", "whatsapp", "handy"),
)
_FIGURES: Final = re.compile(r"\d\D{0,2}\d\D{0,2}\d\D{0,2}\d")
"""Four figures near each other: each number of a person has them."""
_MRZ: Final = re.compile(r"\b[PIAC][A-Z<][A-Z]{3}[A-Z0-9<]{20,60}")
_LOCAL_PHONE: Final = re.compile(
    r"(?<![\w.:/+-])(?:(?:1[ .-])?(?:\([2-9]\d{2}\)[ .-]?|[2-9]\d{2}([ .-]))[2-9]\d{2}(?(1)\1|[ .-])\d{4}"
    r"|\(?0[1-9]\d{0,4}\)?[ /.-]{1,3}\d[\d /.-]{4,14}\d|0[1-9]\d{8,10})(?![\w-]|\.\d)"
)
_REGIONS: Final = ("US", "DE", "GB", "FR", "AT", "CH")
"""Countries whose numbers are found without their code."""
_NUMBERS: Final = (
    ("br.cpf", r"\d{3}\.\d{3}\.\d{3}-\d{2}"),
    ("ca.sin", r"\d{3}([ -])\d{3}\1\d{3}"),
    ("in_.aadhaar", r"\d{4} \d{4} \d{4}"),
    ("it.codicefiscale", r"[A-Z]{6}\d\d[A-Z]\d\d[A-Z]\d{3}[A-Z]"),
    ("es.dni", r"\d{8}-?[A-Z]"),
    ("fr.nir", r"[12] ?\d\d ?\d\d ?\d\d ?\d{3} ?\d{3} ?\d\d"),
    ("se.personnummer", r"\d{6}(?:\d\d)?[-+]\d{4}"),
    ("bitcoin", r"(?:bc1[a-z0-9]{25,60}|[13][A-HJ-NP-Za-km-z1-9]{25,34})"),
)
"""Numbers of persons, by their module in python-stdnum, which knows their check digits."""
_NATIONAL: Final = tuple((name, re.compile(rf"(?<![\w.-]){text}(?![\w-]|\.\d)")) for name, text in _NUMBERS)


def mask_personal(text: str) -> str:
    """Mask e-mail addresses, cards, accounts, phone numbers, network addresses and numbers of persons."""
    if "@" in text or "%40" in text or "＠" in text:
        text = _EMAIL.sub("[email]", text)
    if "<<" in text:
        text = _MRZ.sub("[passport]", text)
    text = _IP.sub(lambda match: "[IP address]" if _is_address(match[0]) else match[0], text)
    if ":" in text or "-" in text:
        text = _MAC.sub("[MAC address]", text)
    if _FIGURES.search(text) is None:
        return text
    text = _CARD.sub(lambda match: "[card number]" if _is_card(match[0]) else match[0], text)
    text = _IBAN.sub(_mask_account, text)
    text = _NINO.sub("[national insurance number]", _SSN.sub("[social security number]", text))
    for name, pattern in _NATIONAL:
        text = pattern.sub(partial(_mask_number, name), text)
    lowered = text.lower()
    return _mask_phones(_NAMED.sub(_mask_named, text) if any(sign in lowered for sign in _NAMED_SIGNS) else text)


def _is_card(text: str) -> bool:
    digits = re.sub(r"\D", "", text)
    return digits[0] in "23456" and len(set(digits)) > 1 and luhn.is_valid(digits)


def _mask_account(match: re.Match[str]) -> str:
    """Mask the longest part that is an account: words may follow it."""
    text = match[0]
    for end in range(len(text), 14, -1):
        if (end == len(text) or not text[end].isalnum()) and iban.is_valid(text[:end]):
            return f"[IBAN]{text[end:]}"
    return text


def _is_address(text: str) -> bool:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    return not (address.is_loopback or address.is_unspecified)


def _mask_number(name: str, match: re.Match[str]) -> str:
    return "[personal number]" if _checks(name)(match[0]) else match[0]


@cache
def _checks(name: str) -> Callable[[str], bool]:
    module: Any = import_module(f"stdnum.{name}")
    check: Callable[[str], bool] = module.is_valid
    return check


def _mask_named(match: re.Match[str]) -> str:
    value = match["value"]
    digits = sum(letter.isdigit() for letter in value)
    words = re.search(r"[A-Za-z]{4,}| [A-Za-z]{2,}", value)
    if digits < 6 or (words is not None and words.start() < 6):
        return match[0]
    rest = value[words.start() :] if words is not None else ""
    start = match.start("value") - match.start()
    return f"{match[0][:start]}[{match['kind'].lower()}]{rest}"


def _mask_phones(text: str) -> str:
    if "+" in text:
        for match in reversed(list(phonenumbers.PhoneNumberMatcher(text, None))):
            text = f"{text[: match.start]}[phone number]{text[match.end :]}"
    return _LOCAL_PHONE.sub(lambda match: "[phone number]" if _is_phone(match[0]) else match[0], text)


def _is_phone(text: str) -> bool:
    regions = _REGIONS[1:] if text.lstrip("(").startswith("0") else _REGIONS[:1]
    for region in regions:
        try:
            number = phonenumbers.parse(text, region)
        except phonenumbers.NumberParseException:
            continue
        if region == "US" or phonenumbers.is_valid_number(number):
            return True
    return False
