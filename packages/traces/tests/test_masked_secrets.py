"""Planted secrets of many kinds and in many places of a span: what an import keeps and curate writes holds none."""

from __future__ import annotations

import asyncio
import base64
import json
import random
import sqlite3
import string
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from planted_traces import TOOL, Ids, openinference, otlp_export, span, talk, write_lines

from lightningrl.plugins import load_plugins
from lightningrl_traces.curation.curation import curate
from lightningrl_traces.curation.rules import Rules
from lightningrl_traces.grades import Grade, grade_call
from lightningrl_traces.importing import import_traces
from lightningrl_traces.records import Call
from lightningrl_traces.secrets import mask_call, mask_text

BASE62 = string.ascii_letters + string.digits
HEX = "0123456789abcdef"
SENTENCE = "It costs 12 euros."


def draw(rng: random.Random, length: int, letters: str = BASE62) -> str:
    return "".join(rng.choices(letters, k=length))


def tokens(rng: random.Random) -> list[tuple[str, str]]:
    """Text to plant, and the secret in it: keys with values, headers, tokens by their beginnings."""
    word, key, long = f"hunter{draw(rng, 3, string.digits)}!x", draw(rng, 40), draw(rng, 64, HEX)
    pair = base64.b64encode(f"ada:{word}".encode()).decode()
    told = [
        (f"password={word}", word),
        (f"export DB_PASSWORD='{word}'", word),
        (f"Authorization: Bearer {key}", key),
        (f"curl -H 'authorization: Basic {pair}'", pair),
        (f"aws_secret_access_key = {key}", key),
        (json.dumps({"aws_secret_access_key": key}), key),
        (json.dumps({"arguments": json.dumps({"password": word})}), word),
        (f"postgres://ada:p@{word}@db.example.org/x", word),
        (f"redis://:{word}@cache:6379", word),
        (f"https://x.blob.core.windows.net/c/f?sv=2024&sig={key}%3D", key),
        (f"AGE-SECRET-KEY-1{draw(rng, 58, string.ascii_uppercase + string.digits)}", ""),
        (f"PuTTY-User-Key-File-3: ssh-ed25519\nPrivate-Lines: 1\n{key}\nPrivate-MAC: {long}", key),
        (f"AKIA\u200b{draw(rng, 16, string.ascii_uppercase + '234567')}", ""),
        (base64.b64encode(f"password={word}".encode()).decode(), ""),
        (f"eyJ{draw(rng, 20)}.eyJ{draw(rng, 40)}.{draw(rng, 43)}", ""),
        (f"-----BEGIN OPENSSH PRIVATE KEY-----\n{key}\n-----END OPENSSH PRIVATE KEY-----", key),
        (f"{draw(rng, 10, string.digits)}:{draw(rng, 35)}", ""),
        (f"my password is {word}", word),
        (f"set the password to '{word}'", word),
        (f"<password>{word}</password>", word),
        (f"mysql --password {word} -h db", word),
        (f"api_key: {draw(rng, 24, HEX)}", ""),
        (f'client_secret = "{draw(rng, 20)}"', ""),
        (f"sk-{draw(rng, 12)}7", ""),
    ]
    for sign, length, letters in (
        *(("github_pat_", 82, BASE62), ("ghp_", 36, BASE62), ("xapp-1-A1-", 40, BASE62), ("ya29.", 60, BASE62)),
        *(("gsk_", 52, BASE62), ("r8_", 37, BASE62), ("xai-", 80, BASE62), ("pplx-", 48, BASE62), ("key-", 32, HEX)),
        *(("npm_", 36, BASE62), ("dckr_pat_", 27, BASE62), ("dop_v1_", 64, HEX), ("shpat_", 32, HEX)),
        *(("dapi", 32, HEX), ("hvs.", 90, BASE62), ("lin_api_", 40, BASE62), ("secret_", 43, BASE62)),
        *(("sk-ant-api03-", 93, BASE62), ("hf_", 34, BASE62), ("AIza", 35, BASE62), ("glpat-", 20, BASE62)),
    ):
        told.append((sign + draw(rng, length - 2, letters) + "a7", ""))
    return told


def persons(rng: random.Random) -> list[tuple[str, str]]:
    """Personal data, of several countries."""
    last = draw(rng, 4, string.digits)
    return [
        (f"(415) 555-{last}", ""),
        (f"212-555-{last}", ""),
        (f"030 9018{last}", ""),
        (f"0171 234{last}", ""),
        (f"+1 415 555 {last}", ""),
        (f"phone: 4155{last}22", f"4155{last}22"),
        ("536-22-8726", ""),
        ("AB 12 34 56 C", ""),
        ("passport number C01X00T47", "C01X00T47"),
        ("passport: 533401372", "533401372"),
        ("203.0.113.77", ""),
        ("10.20.30.40", ""),
        ("de89 3704 0044 0532 0130 00", ""),
        ("GB82WEST12345698765432", ""),
        ("4111.1111.1111.1111", ""),
        ("5555 5555 5555 4444.", "5555 5555 5555 4444"),
        ("jürgen@münchen.de", ""),
        ("user@xn--mnchen-3ya.de", ""),
        ("ada.lovelace%40example.org", ""),
        ("2001:db8:85a3::8a2e:370:7334", ""),
    ]


def unlisted(rng: random.Random) -> list[tuple[str, str]]:
    """Kinds that the reference does not name."""
    word = f"tr0ub{draw(rng, 4, string.digits)}&3"
    return [
        (f"figd_{draw(rng, 40)}9a", ""),
        (f"sntrys_{draw(rng, 60)}9a", ""),
        (f"Cookie: session={draw(rng, 40)}; theme=dark", "session="),
        (f"$2b$12${draw(rng, 53)}", ""),
        (f"PrivateKey = {draw(rng, 42)}8=", ""),
        ("390.533.447-05", ""),
        ("00:1b:44:11:3a:b7", ""),
        ("P<UTOERIKSSON<<ANNA<MARIA<<<<<<<<<<<<<<<<<<<", ""),
        (f'{{"name": "ADMIN_PASSWORD", "value": "{word}"}}', word),
        ("your PIN is 4711", "4711"),
        (f"env:\n  - name: DB_PASSWORD\n    value: {word}", word),
        (f'<input type="password" name="p" value="{word}">', word),
        (f"data-x=&quot;password&quot;: &quot;{word}&quot;", word),
        (f"/next?x=password%3D{word}", word),
        (f"CREATE USER ada IDENTIFIED BY '{word}'", word),
        (f"mysql -u root -p{word} shop", word),
        (f"sshpass -p '{word}' ssh host", word),
        (f"redis-cli -a {word} ping", word),
        (f"ada:{word}@tcp(db:3306)/shop", word),
        (f"| password | {word} |", word),
        (f"password: >-\n  {word}", word),
        (f"password: \x1b[32m{word}\x1b[0m", word),
        (f"AKIA\ufe0f{draw(rng, 16, string.ascii_uppercase + '234567')}", ""),
        (f"p\uff41ssword\uff1d{word}", word),
        (json.dumps(json.dumps(json.dumps(json.dumps({"password": word})))), word),
        (f"password\\u003d{word}", word),
        ("ada.lovelace\\u0040example.org", ""),
        (base64.b64encode(f"password={word};".encode("utf-16-le")).decode(), ""),
        (f"https://acme.webhook.office.com/webhookb2/{draw(rng, 24)}", ""),
        *halves_of_keys(rng),
        (f"key = {draw(rng, 63, HEX)}7", ""),
        (f'{{"aes_key": "{draw(rng, 31, HEX)}7"}}', ""),
        (f"wallet key: 0x{draw(rng, 63, HEX)}7", ""),
        (f"hmac key: {':'.join(draw(rng, 2, HEX) for _ in range(20))}", ""),
        (f"wpa_psk={draw(rng, 63, HEX)}7", ""),
        (f"SEED={draw(rng, 63, HEX).upper()}7", ""),
        (f"p\u0430ssw\u043erd={word}", word),
        (f"DB_\u0420ASSW\u039fRD: {word}", word),
        (f'{{"\u0430pi_k\u0435y": "{draw(rng, 30)}7"}}', ""),
    ]


def halves_of_keys(rng: random.Random) -> list[tuple[str, str]]:
    """Private keys of which a line or two are missing: the text, and a line of it that is left out."""

    def lines(first: str, count: int, end: str = "\n") -> tuple[str, str]:
        rows = [draw(rng, 64) for _ in range(count)]
        return end.join([first + rows[0][len(first) :], *rows[1:], f"{draw(rng, 20)}=="]), rows[-1]

    told = []
    for first in ("MIIEpAIBAAKCAQEA", "MIIEvQIBADANBgkq", "b3BlbnNzaC1rZXktdjEA", "MHcCAQEEI", "MIGHAgEAMBMGByqGSM49"):
        block, line = lines(first, 6)
        told.append((f"{block}\n", line))
    block, line = lines("", 6)
    told.append((f"my RSA private key is:\n{block}", line))
    block, line = lines("", 6, "\\n")
    told.append((f"PRIVATE KEY\\n{block}", line))
    block, line = lines("", 6)
    told.append((f"it ends so:\n{block}\n-----END EC PRIVATE KEY-----", line))
    block, line = lines("", 6)
    told.append((f"Private-Lines: 14\n{block}", line))
    return told


def arguments(text: str) -> list[dict[str, Any]]:
    return [{"id": "c", "type": "function", "function": {"name": "lookup", "arguments": text}}]


PLACES: tuple[tuple[tuple[Any, ...], Callable[[str], Any]], ...] = (
    (("messages", 0, "content"), str),
    (("messages", 1, "content"), str),
    (("messages", 0, "content"), lambda secret: json.dumps({"deep": [{"er": secret}]})),
    (("tool", "function", "name"), str),
    (("tool", "function", "description"), str),
    (("tool", "function", "parameters", "properties"), lambda secret: {secret: {"type": "string"}}),
    (("tool", "function", "parameters", "properties", "q", "default"), str),
    (("tool", "function", "parameters", "properties", "q", "enum"), lambda secret: [secret]),
    (("answer", "content"), str),
    (("answer", "reasoning_content"), str),
    (("answer", "tool_calls", 0, "id"), str),
    (("answer", "tool_calls", 0, "function", "name"), str),
    (("answer", "tool_calls"), lambda secret: arguments(json.dumps({"q": secret}))),
    (("answer", "tool_calls"), lambda secret: arguments(json.dumps({secret: 1}))),
    (("values", "llm.model_name"), str),
    (("values", "agent.name"), str),
    (("values", "session.id"), str),
    (("values", "metadata"), lambda secret: json.dumps({"user": secret})),
    (("values", "llm.finish_reason"), str),
    (("more", "name"), str),
    (("more", "status"), lambda secret: {"code": 2, "message": secret}),
)
"""Places of a span, each with what a secret is there."""


def in_place(path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """A span's attributes, and what else it has, with a value at one place."""
    prompt, answer, _ = talk(7).calls[0]
    whole: Any = json.loads(json.dumps({"messages": prompt, "tool": TOOL, "answer": answer, "values": {}, "more": {}}))
    inner = whole
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    flat = openinference(whole["messages"], whole["answer"], "stop")
    flat["input.value"] = json.dumps({"messages": whole["messages"], "tools": [whole["tool"]]})
    flat["llm.tools.0.tool.json_schema"] = json.dumps(whole["tool"])
    return {"values": {**flat, **whole["values"]}, **whole["more"]}


def every_text(*folders: Path) -> str:
    """All that files and tables hold, as one text."""
    texts: list[str] = []
    for path in (path for folder in folders for path in sorted(folder.rglob("*")) if path.is_file()):
        texts.append(path.read_bytes().decode("utf-8", "replace"))
        if path.suffix == ".sqlite":
            with sqlite3.connect(path) as db:
                for (table,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
                    rows = db.execute(f"SELECT * FROM {table}").fetchall()
                    texts += [
                        cell.decode("utf-8", "replace") if isinstance(cell, bytes) else str(cell)
                        for row in rows
                        for cell in row
                    ]
    return "\n".join(texts)


def is_in(secret: str, kept: str) -> bool:
    """True where a text has a secret, in JSON too."""
    return any(
        form in kept for form in (secret, json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1])
    )


EXPLAINED: tuple[str, ...] = ()
"""Secrets that are left: none today."""


def test_planted_secrets_of_all_kinds_and_places_are_masked(tmp_path: Path) -> None:
    rng = random.Random(48)
    told = [*tokens(rng), *persons(rng), *unlisted(rng)]
    assert len(told) >= 74
    spans, secrets = [], []
    for number, (text, secret) in enumerate(told):
        talked = talk(number, f"see {text} ok")
        spans.append(span(Ids(number), 1, openinference(*talked.calls[0])))
        secrets.append(secret or text)
    for number, (path, wrap) in enumerate([*PLACES, *PLACES], len(told)):
        secret = f"ghp_{draw(rng, 34)}a7" if number % 2 else f"ada{number}x@example.org"
        made = in_place(path, wrap(secret))
        spans.append(span(Ids(number), 1, made.pop("values"), **made))
        secrets.append(secret)
    assert len(secrets) >= 106
    write_lines(tmp_path / "x.json", [otlp_export(spans, ())])
    import_traces(tmp_path / "x.json", tmp_path / "run", None, load_plugins())
    asyncio.run(curate([tmp_path / "run"], tmp_path / "rows", Rules(grades=frozenset({"sft-safe", "judge-only"}))))
    kept = every_text(tmp_path / "run", tmp_path / "rows")
    assert "see [" in kept and "What is word 7?" in kept, "the texts themselves are there"
    assert [secret for secret in secrets if is_in(secret.strip("."), kept) and secret not in EXPLAINED] == []


def test_secrets_are_masked_by_their_place_in_json_too() -> None:
    word, long = "tr0ub4dor&3", "0123456789abcdef" * 3
    for value in (
        {"password": 12345678},
        {"passwords": [word]},
        {"password": {"value": word}},
        {"name": "DB_PASSWORD", "value": word},
        {"headers": [["X-Api-Key", long]]},
        {"argv": ["mysql", "--password", word]},
        ["curl", "-u", f"ada:{word}"],
        {"card": 4111111111111111},
        {"ssn": 536228726},
        {"kty": "oct", "k": long},
    ):
        text = json.dumps({"deep": [json.dumps({"er": value})]})
        secret = next(part for part in (word, long, "12345678", "4111111111111111", "536228726") if part in text)
        for written in (text, text.replace("a", "\\u0061")):
            message = {"role": "assistant", "content": "", "tool_calls": arguments(written)}
            masked = mask_call(Call(id="c", trace_id="t", messages=[message], answer=message))
            assert secret not in json.dumps(masked.messages) and secret not in json.dumps(masked.answer)
            kept = json.loads((masked.messages or [])[0]["tool_calls"][0]["function"]["arguments"])
            assert set(masked.notes) & {"secret masked", "personal data masked"} and "[" in kept["deep"][0]
    harmless = {
        "required": ["name", "password"],
        "max_tokens": 123456,
        "at": 1732873554000,
        "secret": True,
        "n": [1, 2],
    }
    assert mask_text(json.dumps(harmless)) == (json.dumps(harmless), False, False, False)


def test_harmless_ids_hashes_and_prose_are_left_alone() -> None:
    rng = random.Random(2)
    ids = [
        *(str(uuid.UUID(int=rng.getrandbits(128))) for _ in range(200)),
        *(draw(rng, 40, HEX) for _ in range(200)),
        *(draw(rng, 64, HEX) for _ in range(200)),
        *(f"{draw(rng, 32, HEX)}-{draw(rng, 16, HEX)}" for _ in range(200)),
        *(f"call_{draw(rng, 24)}" for _ in range(200)),
        *(f"toolu_01{draw(rng, 22)}" for _ in range(200)),
        *(f"chatcmpl-{draw(rng, 29)}" for _ in range(200)),
    ]
    flagged = [text for text in ids if mask_text(f"the id is {text}, it ended")[1:] != (False, False, False)]
    assert flagged == []
    for text in (
        "max_tokens=4096, tokens: 512, total_tokens = 20",
        'def login(user, password: str, token=None): return check(password, os.environ["API_KEY"])',
        '{"type": "object", "properties": {"password": {"type": "string", "description": "The user\'s password, 8 signs"}}}',
        "Reset the password to continue, and change the token to another; a password to remember.",
        "Enter your password: <password>. Authorization: Bearer $TOKEN. api_key: YOUR_API_KEY",
        "The secret is to listen. A basic understanding of tokens helps; the key is patience.",
        "getUserByIdFromDatabaseTable2 and AbstractSingletonProxyFactoryBean in sklearn, task-12345, risk-assessment-2024",
        "Python 3.11.4, 2026-11-28T21:10:30Z, 12:30:45, 1,234,567.89 USD, room 101-2034, ISBN 978-3-16-148410-0",
        "app.py:1204: unused:name, docker run -p 8080:80 ghcr.io/org/app:1.2, mailto:x, mysql -h db -P 3306, \\d{4}\\w+",
        "self.password = settings.db_password; if not password: raise ValueError",
        f"cache key: {'3f786850e387550f' * 4}, cache_key={'3f786850e387550f' * 4}, public key 0x{'3f786850e387550f' * 4}",
        "Keep the private key in a vault, with its password. \u041f\u0430\u0440\u043e\u043b\u044c \u0438 ip-\u0430\u0434\u0440\u0435\u0441, \u041e\u041e\u041e",
    ):
        assert mask_text(text) == (text, False, False, False)


def test_a_row_with_a_random_string_that_no_rule_names_is_not_sft_safe() -> None:
    def graded(text: str) -> tuple[Grade, tuple[str, ...]]:
        asked = [{"role": "user", "content": text}]
        answer = {"role": "assistant", "content": "Done."}
        call = grade_call(mask_call(Call(id="c", trace_id="t", messages=asked, answer=answer, finish_reason="stop")))
        return call.grade, call.reasons

    grade, reasons = graded("use Zq7Rt2Xw9Lp4Vb8Nk3Hm5 here")
    assert grade is Grade.JUDGE and "may hold a secret that no rule names" in reasons
    assert graded("use commit 3f786850e387550fdab836ed7e6dc881de23001b here")[0] is Grade.SFT


PIECES = (
    *(
        "a",
        "a ",
        "password=",
        "sk-",
        "eyJ",
        "://a:a@",
        "1 ",
        "12:",
        "-----BEGIN ",
        "@a.",
        "0 1",
        "ab12 ",
        "key: ",
        "+1",
    ),
    *("bearer ", "=>", '\\"password\\": ', "//a:", "phone ", "\u200b", "x" * 63 + "@", "token is ", "authorization: a"),
    *(
        "mysql -",
        "redis-cli ",
        "a/a",
        "\\\\\\",
        "\\u0041",
        "&#65;",
        'password" ',
        "password|",
        "%3d",
        "\x1b[",
        "a:5432:",
        "private key ",
        "MIIEpAIBAAKCAQEA" * 3 + "\n",
        "-----END PRIVATE KEY-----",
        "a\u0430",
    ),
)


def test_a_megabyte_of_the_beginnings_of_secrets_is_masked_in_seconds() -> None:
    size = 2**20 // len(PIECES)
    text = "".join(piece * (size // len(piece)) for piece in PIECES)
    before = time.process_time()
    mask_text(text)
    assert time.process_time() - before < 30.0, "a pattern that is quadratic takes minutes"
