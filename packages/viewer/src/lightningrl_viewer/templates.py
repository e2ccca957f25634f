"""Templates: Jinja2 with autoescape, imported when somebody first looks, and the filters that write values as HTML."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lightningrl.sanitize import as_text, one_line, printable
from lightningrl_runs.dialogue import final_text, question_of

if TYPE_CHECKING:
    from jinja2 import Environment

__all__ = ["FILTERS", "NOTHING", "STATIC", "render", "static_version"]

_HERE: Final = Path(__file__).parent
STATIC: Final = _HERE / "static"
_ASKS: Final = ("question", "prompt", "query", "instruction", "problem", "text", "input")
_ROUNDING: Final = 1e-6
"""Nats below which two computations of one number differ."""
NOTHING: Final = "–"
"""Text where there is no number; 0 is a number."""


def render(template: str, values: Mapping[str, Any]) -> str:
    return _environment().get_template(template).render(values)


@cache
def static_version() -> str:
    """Return a version that changes with what lies in `static`, so that a browser keeps what it has until then."""
    digest = hashlib.sha256()
    for path in sorted(STATIC.iterdir()):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    environment.filters.update(FILTERS)
    return environment


def number(value: float | None, digits: int = 3) -> str:
    """`0.500`; large ones with fewer digits."""
    if value is None or not math.isfinite(value):
        return NOTHING
    if abs(value) >= 100:
        digits = max(0, digits - 2)
    if value and abs(value) < 10**-digits:
        return f"{value:.1e}"
    return f"{value:,.{digits}f}".replace("-", "−")


def ends(low: float | None, high: float | None) -> str:
    """Write an interval: `0.01 – 0.16`; more digits where both ends are small. Empty where there is none."""
    if low is None or high is None:
        return ""
    small = max(abs(low), abs(high)) < 0.02
    return " – ".join(plain(end) if small else number(round(end, 2) + 0.0, 2) for end in (low, high))


def signed(value: float | None, digits: int = 3) -> str:
    return number(value, digits) if value is None or value <= 0 else f"+{number(value, digits)}"


def plain(value: float | None) -> str:
    """Write three digits that say something: `0`, `2`, `0.0125`, `1.6e-13`."""
    return NOTHING if value is None or not math.isfinite(value) else f"{value:.3g}".replace("-", "−", value < 0)


def nats(value: float | None) -> str:
    """Write a divergence; `0` where it is the rounding of two computations of one number."""
    return "0" if value is not None and abs(value) < _ROUNDING else plain(value)


def count(value: float | None) -> str:
    """`12,345`."""
    return NOTHING if value is None or not math.isfinite(value) else f"{value:,.0f}".replace("-", "−")


def percent(value: float | None) -> str:
    """Write a share from 0 to 1."""
    if value is None or not math.isfinite(value):
        return NOTHING
    return f"{value:.0%}" if value == 0 or 0.005 <= value <= 0.995 or value == 1 else f"{value:.1%}"


def duration(seconds: float | None) -> str:
    """`37 ms`, `4.2 s`, `3 min 20 s`, `2 h 05 min`."""
    if seconds is None or not math.isfinite(seconds):
        return NOTHING
    if seconds < 0.0995:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def size(value: float | None) -> str:
    """Bytes: `1.2 MB`."""
    if value is None:
        return NOTHING
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"


def clean(text: object) -> str:
    """Show, not obey, control characters and what reorders text in what a model, a tool or an agent wrote."""
    return printable(str(text))


def short(text: object, length: int = 80) -> str:
    """Shorten to the beginning, cleaned."""
    return one_line(str(text), length)


def preview(value: Any, length: int = 80) -> str:
    """Shorten a task to a line: of a table the text that asks, else all of it as JSON."""
    if isinstance(value, Mapping):
        asked = next((value[name] for name in _ASKS if isinstance(value.get(name), str)), None)
        value = asked or question_of(value) or value
    return one_line(as_text(value), length)


def code(text: str) -> str:
    """Write what stands between backticks as code."""
    from markupsafe import Markup, escape

    parts = [escape(clean(part)) for part in text.split("`")]
    parts[1::2] = [Markup("<code>%s</code>") % part for part in parts[1::2]]
    return Markup("").join(parts)


def line(value: Any, length: int = 80) -> str:
    """Shorten an output or an answer to its beginning: text, else JSON."""
    return one_line(final_text(value), length)


FILTERS: Final[Mapping[str, Callable[..., str]]] = {
    "clean": clean,
    "code": code,
    "count": count,
    "duration": duration,
    "ends": ends,
    "line": line,
    "nats": nats,
    "number": number,
    "percent": percent,
    "plain": plain,
    "preview": preview,
    "short": short,
    "signed": signed,
    "size": size,
}
"""Filters by their names in templates."""
