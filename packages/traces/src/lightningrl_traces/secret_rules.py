"""Rules that find secrets in text, each linear in its length.

detect-secrets knows few of today's tokens and some of its patterns are quadratic; larger rule sets are programs in Go
or need a model. So its linear detectors are used, beside tables of prefixes and keys.
"""

from __future__ import annotations

import base64
import binascii
import re
from typing import Final

from detect_secrets.plugins.artifactory import ArtifactoryDetector
from detect_secrets.plugins.azure_storage_key import AzureStorageKeyDetector
from detect_secrets.plugins.discord import DiscordBotTokenDetector
from detect_secrets.plugins.mailchimp import MailchimpDetector
from detect_secrets.plugins.sendgrid import SendGridDetector
from detect_secrets.plugins.square_oauth import SquareOAuthDetector
from detect_secrets.plugins.telegram_token import TelegramBotTokenDetector
from detect_secrets.plugins.twilio import TwilioKeyDetector

from lightningrl_traces.personal_rules import mask_personal

__all__ = ["is_doubtful", "is_secret_pair", "mask_secrets"]

_DETECTORS: Final = tuple(
    detector()
    for detector in (
        ArtifactoryDetector,
        AzureStorageKeyDetector,
        DiscordBotTokenDetector,
        MailchimpDetector,
        SendGridDetector,
        SquareOAuthDetector,
        TelegramBotTokenDetector,
        TwilioKeyDetector,
    )
)
_PREFIXES: Final = """
    ghp_ gho_ ghu_ ghs_ ghr_ github_pat_ glpat- gldt- glrt- glcbt- glptt- glft- glsoat- glimt- glagent- glwt- glffct-
    gloas- GR1348941 xoxa- xoxb- xoxc- xoxd- xoxo- xoxp- xoxr- xoxs- xoxe- xoxe.xoxb- xoxe.xoxp- xapp- xwfp-
    AKIA ASIA ABIA ACCA A3T ABSK ya29. GOCSPX- AIza 1//0 LTAI AKID AQVN t1. pypi- npm_ rubygems_ dckr_pat_ dckr_oat_
    sk- sk_ rk_ pk_live_ whsec_ sq0atp- sq0csp- EAAA gsk_ r8_ xai- pplx- hf_ api_org_ fw_ tgp_v1_ csk- nvapi- tvly- fc-
    lsv2_pt_ lsv2_sk_ ls__ pk-lf- pcsk_ e2b_ jina_ pa- rpa_ cpk_ re_ key- dop_v1_ doo_v1_ dor_v1_
    shpat_ shpca_ shppa_ shpss_ dapi hvs. hvb. hvr. lin_api_ lin_oauth_ secret_ ntn_ figd_ figo_ glsa_ glc_
    NRAK- NRII- NRJS- NRAL- pscale_tkn_ pscale_pw_ pscale_oauth_ pnu_ pul- dp.pt. dp.st. dp.ct. dp.sa. dp.scim.
    dp.audit. EZAK EZTK fo1_ fm1_ fm2_ fio-u- HRKU- pat-na1- pat-na2- pat-eu1- PMAK- sntrys_ sntryu_ sbp_
    sb_secret_ sgp_ xkeysib-
    xsmtpsib- tfp_ vcp_ vci_ vca_ vcr_ vck_ CFPAT- CLOJARS_ AKCp cmVmdGtu aio_ nfp_ nfc_ rnd_ bkua_ CCIPAT_ CCIPRJ_ ops_
    ATATT3 ATCTT3 ATBB rdme_ shippo_live_ shippo_test_ FLWSECK_TEST- FLWSECK- duffel_live_ duffel_test_ dt0c01. dt0s01.
    phx_ phc_ tskey-auth- tskey-api- tskey-client- ico- mlsn. squ_ sqp_ sqa_ access-sandbox- access-production- gAAAAA
    AGE-SECRET-KEY- sk.eyJ pat
"""
"""Beginnings of tokens, as their issuers publish them."""
_TOKEN: Final = re.compile(
    r"(?<![A-Za-z0-9])(?:eyJ[\w-]{8,}\.eyJ[\w-]{8,}(?:\.[\w-]*)*|[A-Za-z0-9]{14}\.atlasv1\.[\w-]{40,}"
    r"|[A-Za-z0-9_~.]{3}\dQ~[\w.~-]{31,34}|A3-[A-Z0-9]{6}(?:-[A-Z0-9]{5,11}){3,5}"
    r"|\$(?:2[abxy]|[156y]|apr1|argon2\w{1,2})\$[^\s:\"']{20,200}"
    r"|https://(?:hooks\.[\w.-]{4,80}|[\w-]{1,63}\.webhook\.office\.com|discord(?:app)?\.com/api/webhooks)"
    r"/[\w/@-]{8,200}"
    rf"|(?P<sign>{'|'.join(sorted(map(re.escape, _PREFIXES.split()), key=len, reverse=True))})"
    r"(?P<tail>[\w-]{6,}(?:\.[\w-]{8,})*=*))"
)
_PRIVATE_KEY: Final = re.compile(
    r"-{4,5} ?BEGIN (?:[A-Z0-9]{1,20} ){0,4}PRIVATE KEY(?: BLOCK)? ?-{4,5}.*?"
    r"(?:-{4,5} ?END (?:[A-Z0-9]{1,20} ){0,4}PRIVATE KEY(?: BLOCK)? ?-{4,5}|\Z)"
    r"|PuTTY-User-Key-File-\d.*?(?:Private-MAC: ?[0-9a-f]+|\Z)",
    re.DOTALL,
)
_BLOCK: Final = r"[A-Za-z0-9+/]{16,}={0,2}(?:(?:\s|\\[nr]){1,4}[A-Za-z0-9+/]{16,}={0,2})*"
_HALF_KEY: Final = re.compile(
    rf"(?:(?i:private[ _-]key)\b[^\n]{{0,40}}?|Private-Lines: \d+)(?:\s|\\[nr]){{1,6}}(?=[A-Za-z0-9+/]{{40}}){_BLOCK}"
    r"|(?<![A-Za-z0-9+/])(?=MII[A-Za-z0-9+/]{3}IBA[AD]|MI[A-Za-z0-9]{2}AgE[AB][BM]|MHcCAQEE|MC4CAQAw|b3BlbnNzaC1rZXk)"
    + _BLOCK
)
"""A private key without its first line: behind its name, or by how such a key begins in base64."""
_END_OF_KEY: Final = re.compile(r"-{4,5} ?END (?:[A-Z0-9]{1,20} ){0,4}PRIVATE KEY")
_BLOCK_BEFORE: Final = re.compile(r"(?:\s|[nr]\\|=)*[A-Za-z0-9+/]+(?:(?:\s|[nr]\\){1,4}[A-Za-z0-9+/]{16,})+")
_KEY: Final = re.compile(
    r"(?P<password>pass(?:word|wd|phrase|code|wort)?(?![a-z])|passwords?|pwd|(?<![a-z])pw(?![a-z])"
    r"|identified by|kennwort|mot de passe|contrase[nñ]a|senha"
    r"|secret|credentials?|connection[ _-]?string|seed[ _-]?phrase|mnemonic|recovery[ _-]?(?:code|phrase))"
    r"|(?P<header>authorization|cookie)"
    r"|(?P<key>api[ _-]?key|(?:access|account|app|auth|client|deploy|encryption|license|master|private|service|session"
    r"|shared|signing|ssh|storage|webhook)[ _-]?key|token(?!iz)|jwt|key-data"
    r"|sig(?:nature)?(?==)|session[ _-]?id|(?<=[?&])key(?==))"
    r"|(?<![a-z])(?P<number>pin(?: code)?|cvv|cvc|otp)(?![a-z])"
    r"|(?<!cache[ _-])(?<!public[ _-])(?<!partition[ _-])(?<!idempotency[ _-])(?P<hex>key|seed|psk)",
    re.IGNORECASE,
)
_SIGNS: Final = """
    pass pw identified kennwort contrase senha secret credential connection seed mnemonic recovery authorization
    cookie key token jwt sig session pin cvv cvc otp psk
"""
_KEY_SIGNS: Final = tuple(map(re.compile, _SIGNS.split()))
"""Texts of which each key has one: found many times faster than the keys."""
_QUOTE: Final = r"(?:\\{0,31}(?:[\"'`]|u002[27])|%2[27]|&(?:quot|apos|#0?3[49]);)"
"""Quotes, also within texts of JSON, URLs and HTML."""
_GIVEN: Final = re.compile(
    rf"[\w-]{{0,24}}(?:{_QUOTE}|[\])*]){{0,3}}"
    rf"(?:(?P<sep>\s{{0,4}}(?:=>|:=|={{1,3}}|[:：|]|%3[ad])\s{{0,4}}(?:[|>][+-]?\s{{1,40}}|\[\s{{0,40}}|-\s)?|>"
    r"|\s{1,4}(?:is|was|to|lautet|ist)\s{1,4}:?)"
    rf"|(?:\s?,?\s{{0,40}}|(?<=\")[^<>\n]{{0,80}}\s){_QUOTE}?value{_QUOTE}?\s?[:=]\s?"
    rf"|\s{{1,3}}(?={_QUOTE})|(?P<flag>\s))"
    rf"(?:(?P<quote>{_QUOTE}{{1,3}})(?P<quoted>[^\"'`\n\\]{{1,512}})"
    rf"|\\{{0,3}}(?P<bare>[^\s\"'`,;&<>)}}\]\\]{{1,512}}))",
    re.IGNORECASE,
)
"""Forms in which a value follows a key: `=`, `:`, `=>`, JSON in JSON, `is`, a flag's value."""
_FLAG: Final = re.compile(r"(?:--[\w-]{0,12}|\blogin\s\S{1,30}\s|\b(?:ENV|setx?)\s{1,4}\w{0,30})$")
_REST_OF_LINE: Final = re.compile(r"[^\"'`\n\\<>]{0,512}")
_REST: Final = re.compile(r"[^\s\"'`,;&<>)}\]\\]*")
_WORDS: Final = """
    none null nil true false undefined string str text number int integer bool boolean object bytes
    required optional empty hidden redacted invalid incorrect wrong missing expired reset field input
    unknown default password secret token bearer basic name type value example changed sent stored
"""
_NO_VALUE: Final = frozenset(_WORDS.split())
"""Words behind a key that are no secret."""
_PAGES: Final = re.compile(
    r"(?<![a-z])(?:next|page|pagination|continuation|sync|cursor|max|min|per|stop|eos|bos|pad)[_ -]?$", re.IGNORECASE
)
_SCHEME: Final = re.compile(
    r"\b(?:bearer|basic|digest|negotiate|apikey|token)\s{1,4}([\w.~+/=:-]{8,4096})", re.IGNORECASE
)
_SCHEME_SIGNS: Final = ("bearer", "basic", "digest", "negotiate", "apikey", "token")
_URL: Final = re.compile(r"(?<=://)([^\s/?#:@\"'<>]{0,100}):([^\s\"'<>]{1,300})@")
_USER: Final = re.compile(r"(?<!\S)((?:-u|--user)[ =]?[\"']?[\w.@-]{1,64}:)([^\s\"']{3,200})")
_OPTION: Final = re.compile(
    r"\b(?:sshpass\s{1,4}-p\s?|redis-cli\b[^\n|;&]{0,80}?\s-a\s"
    r"|(?:mysql|mysqldump|mysqladmin|mariadb)\b[^\n|;&]{0,80}?\s-p"
    r"|docker login\b[^\n|;&]{0,80}?\s-p\s)[\"']?([^\s\"']{3,200})"
)
"""A password behind an option that other programs have for something else."""
_LOGIN: Final = re.compile(
    r"(?<![\w/.-])(?:[\w.-]{1,64}[:/]([^\s:@/\"'<>]{3,128})@(?:(?:tcp|unix)\(|[\w.-]{1,100}:\d{2,5}\b)"
    r"|[\w.*-]{1,100}:(?:\d{4,5}|\*):[\w*-]{1,63}:[\w.-]{1,63}:(\S{3,200})$)",
    re.MULTILINE,
)
"""A user with a password before a host, without a scheme; a line of `.pgpass`."""
_RUN: Final = re.compile(r"[A-Za-z0-9]+")
_KINDS: Final = re.compile(r"[a-z]+|[A-Z]+|[0-9]+")
_BASE64: Final = re.compile(r"(?<![\w+/-])[A-Za-z0-9+/_-]{16,}={0,2}")
_UNNAMED: Final = re.compile(r"(?<![\w/+.-])[\w+-]{20,128}={0,2}(?![\w/+-])")
_WORD: Final = re.compile(r"\b(?:password|passwort|passphrase)\s?:\s([a-z]{5,24})\b(?!\s[a-z])", re.IGNORECASE)
_IDS: Final = re.compile(
    r"(?:call|toolu|srvtoolu|tooluse|chatcmpl|cmpl|msg|resp|req|fc|ctc|rs|run|lc_run|thread|asst|step|file|batch|ft"
    r"|item|gen|trace|span|session|sess|conv|obs|evt|vs|ws|mcp|fp|org|proj|user|price|prod|cus|pi|in|sub|id)[_-]"
)
"""Ids of calls, answers and objects: random, and no secrets."""


def mask_secrets(text: str, *, decodes: bool = True) -> str:
    """Mask tokens by their beginnings, values by their keys, headers, passwords of addresses, and such in base64."""
    if "PRIVATE KEY" in text or "PuTTY" in text:
        text = _mask_half_before_end(_PRIVATE_KEY.sub("[secret: private key]", text))
    text = _HALF_KEY.sub("[secret: private key]", text)
    if "://" in text:
        text = _URL.sub(_mask_address, text)
    text = _TOKEN.sub(_mask_token, text)
    text = _mask_values(text)
    lowered = text.lower()
    if any(sign in lowered for sign in _SCHEME_SIGNS):
        text = _SCHEME.sub(_mask_scheme, text)
    if "-u" in text:
        text = _USER.sub(r"\1[secret: password]", text)
    if " -" in text:
        text = _OPTION.sub(_mask_password, text)
    if ":" in text:
        text = _LOGIN.sub(_mask_password, text)
    for detector in _DETECTORS:
        for secret in detector.analyze_string(text):
            text = text.replace(secret, f"[secret: {detector.secret_type}]") if secret else text
    return _BASE64.sub(_mask_base64, text) if decodes else text


def _mask_half_before_end(text: str) -> str:
    """Mask the lines of base64 before the end of a private key whose beginning is elsewhere."""
    parts, done = [], 0
    for end in _END_OF_KEY.finditer(text):
        block = _BLOCK_BEFORE.match(text[max(done, end.start() - 8192) : end.start()][::-1])
        if block is not None:
            parts += [text[done : end.start() - block.end()], "[secret: private key]\n"]
            done = end.start()
    return "".join([*parts, text[done:]])


def _mask_address(match: re.Match[str]) -> str:
    is_port = re.match(r"\d{1,5}(?:[/?#]|$)", match[2]) is not None
    return match[0] if is_port or match[2].startswith("[secret") else f"{match[1]}:[secret: password]@"


def _mask_password(match: re.Match[str]) -> str:
    value = match[match.lastindex or 0]
    return match[0] if value.startswith("[secret") else match[0].replace(value, "[secret: password]")


def _mask_token(match: re.Match[str]) -> str:
    sign = match["sign"]
    is_known = sign is None or _looks_random(match["tail"], 6 if sign == "sk-" else 8)
    return "[secret: token]" if is_known else match[0]


def _looks_random(text: str, least: int = 8) -> bool:
    """True for a text with a run of letters and digits, of digits alone, or of letters longer than words are."""
    for run in _RUN.findall(text):
        if len(run) >= least and (run.isdigit() or not run.isalpha()):
            return True
        if len(run) >= 20 or (len(run) >= 14 and len(_KINDS.findall(run)) > len(run) // 3):
            return True
    return False


def _mask_values(text: str) -> str:
    """Mask values that stand behind a key: `password=…`, `"api_key": "…"`, `token is …`, `--password …`."""
    parts: list[str] = []
    at = done = 0
    lowered = text.replace("\u0130", "i").lower()  # of the same length: only this letter becomes two
    for place in sorted({match.start() for sign in _KEY_SIGNS for match in sign.finditer(lowered)}):
        key = _KEY.search(text, max(at, place - 16), place + 24) if place >= at else None
        if key is None:
            continue
        at = key.end()
        given = _GIVEN.match(text, at)
        if given is None or (given["flag"] and not _FLAG.search(text, max(0, key.start() - 40), key.start())):
            continue
        form = "quoted" if given["quoted"] else "bare"
        start, end = given.span(form)
        if key["header"]:
            end = _REST_OF_LINE.match(text, start).end()  # type: ignore[union-attr]
        elif form == "bare":
            end = _REST.match(text, end).end()  # type: ignore[union-attr]
        value = text[start:end].rstrip(".!?:* ")
        is_page = key["key"] and _PAGES.search(text, max(0, key.start() - 14), key.start())
        if not is_page and _is_secret_value(
            str(key.lastgroup), key[0], value, is_quoted=form == "quoted", sep=given["sep"] or ""
        ):
            parts += [text[done:start], f"[secret: {'password' if key['password'] else 'key'}]"]
            at = done = start + len(value)
        else:
            at = start
    return "".join([*parts, text[done:]]) if parts else text


def is_secret_pair(key: str, value: str) -> bool:
    """True where the value of an object's key is a secret."""
    match = _KEY.search(key)
    return match is not None and _is_secret_value(str(match.lastgroup), match[0], value, is_quoted=True, sep=":")


def _is_secret_value(family: str, key: str, value: str, *, is_quoted: bool, sep: str) -> bool:
    """True where what stands behind a key of a family is a secret: no placeholder, type, variable or sentence."""
    lowered = value.lower()
    has_digit = any(letter.isdigit() for letter in value)
    if family == "number":
        return re.fullmatch(r"\d{3,8}", value) is not None and (key.lower() != "pin" or len(value) > 3)
    if family == "hex":
        return re.fullmatch(r"(?:0x)?(?:[\da-f]{2}[: ]?){16,}", lowered) is not None
    if len(value) < 4 or lowered in _NO_VALUE or re.match(r"[<\[({*]|\$[A-Z_{(]|%[s(]|your|xxx|\.\.\.", value):
        return False
    if not is_quoted and (
        re.search(r"\w[(\[]", value) or (not has_digit and re.fullmatch(r"[A-Za-z_]+(?:[._][A-Za-z_]+)+", value))
    ):
        return False  # code
    if family == "header":
        return _looks_random(value) or "=" in value
    if family == "key":
        is_mixed = has_digit and any(map(str.isalpha, value)) and len(value) >= 6
        return " " not in value and (is_mixed or _looks_random(value, 12))
    if value.count(" ") > 2:
        return "phrase" in key.lower() or "mnemonic" in key.lower()
    has_sign = has_digit or re.search(r"[^\w\s.,'-]", value) is not None
    if sep.strip(" :").isalpha():
        return has_sign
    return has_sign or is_quoted or sep in ("=", ">") or "phrase" in key.lower()


def _mask_scheme(match: re.Match[str]) -> str:
    value = match[1]
    plain = _decode(value) if match[0][:5].lower() == "basic" else None
    is_secret = ":" in plain if plain is not None else _looks_random(value)
    return match[0].removesuffix(value) + "[secret: header]" if is_secret else match[0]


def _decode(text: str) -> str | None:
    """The text that a text is in base64; None where it is none."""
    try:
        plain = base64.b64decode(text.rstrip("=").translate({45: 43, 95: 47}) + "=" * (-len(text.rstrip("=")) % 4))
        decoded = plain.replace(b"\0", b"").decode()  # PowerShell's is in UTF-16
    except (ValueError, binascii.Error):
        return None
    return decoded if all(letter.isprintable() or letter in "\r\n\t" for letter in decoded) else None


def _mask_base64(match: re.Match[str]) -> str:
    plain = _decode(match[0])
    if plain is None:
        return match[0]
    is_pair = re.fullmatch(r"[\w.@-]{2,64}:\S{4,64}", plain) is not None
    is_secret = is_pair or mask_secrets(plain, decodes=False) != plain or mask_personal(plain) != plain
    return "[secret: base64]" if is_secret else match[0]


def is_doubtful(text: str) -> bool:
    """True where a text has a random string that no rule names and that is no id, hash or number, or a password that
    may be a word."""
    for match in _UNNAMED.finditer(text):
        word = match[0]
        kinds = _KINDS.findall(word)
        has_all = any(kind.islower() for kind in kinds) and any(kind.isupper() for kind in kinds)
        is_mixed = has_all and sum(kind.isdigit() for kind in kinds) > 1
        if is_mixed and len(kinds) > 0.45 * len(word) and _IDS.match(word) is None:
            return True
    return any(match[1].lower() not in _NO_VALUE for match in _WORD.finditer(text))
