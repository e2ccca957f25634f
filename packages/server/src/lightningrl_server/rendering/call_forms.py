"""The pieces of a tool call written as JSON, by markup: a forced call begins with the first of them, in the prompt, and
the grammar of the rest is made of the others.

    begin  before_name NAME before_arguments ARGUMENTS after  between before_name …  end
    [TOOL_CALLS] [  {"name":  "f" , "arguments":  {…}  }          ,                  ]
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Final

__all__ = ["FORMS", "CallForm", "find_form"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CallForm:
    """The text around names and arguments of calls, in the order in which it stands."""

    begin: str = ""
    before_name: str = '{"name": '
    before_arguments: str = ', "arguments": '
    after: str = "}"
    between: str | None = None
    """None = one call only."""
    end: str = ""
    is_quoted: bool = True
    """Names are JSON strings; else they stand as they are."""

    @property
    def opening(self) -> str:
        """Beginning of a call of any tool; it ends where a tokenizer's words end."""
        return self.begin or self.before_name.rstrip()

    def open_with(self, name: str | None) -> str:
        """Beginning of a call of the tool `name`, or (None) of any."""
        if name is None:
            return self.opening
        return f"{self.begin}{self.before_name}{self.write_name(name)}{self.before_arguments.rstrip()}"

    @property
    def example(self) -> str:
        """A whole call of a tool NAME."""
        arguments = f"{self.before_arguments}{{…}}{self.after}"
        return f"{self.begin}{self.before_name}{self.write_name('NAME')}{arguments}{self.end}"

    def write_name(self, name: str) -> str:
        """A tool's name as it stands in a call."""
        return json.dumps(name) if self.is_quoted else name

    @property
    def pattern(self) -> re.Pattern[str]:
        """The beginning of a call at the end of a text: of any tool, or of one by name."""
        name = r'"[^"\n]{1,128}"' if self.is_quoted else r"[^\s\[{]{1,128}"
        whole = re.escape(self.begin + self.before_name) + name + re.escape(self.before_arguments.rstrip())
        return re.compile(rf"(?:{whole}|{re.escape(self.opening)})\Z")


_TAGS: Final = CallForm(begin="<tool_call>\n", between="\n</tool_call>\n<tool_call>\n", end="\n</tool_call>")
_MISTRAL: Final = CallForm(begin="[TOOL_CALLS] [", between=", ", end="]")
_MISTRAL_NAMES: Final = CallForm(
    begin="[TOOL_CALLS]", before_name="", before_arguments="[ARGS]", after="", between="[TOOL_CALLS]", is_quoted=False
)

FORMS: Final = {
    "hermes": _TAGS,
    "qwen3": _TAGS,
    "mistral": _MISTRAL,
    "functools": CallForm(begin="functools[", between=", ", end="]"),
    "phi": CallForm(begin="<|tool_call|>[", between=", ", end="]<|/tool_call|>"),
    "granite": CallForm(begin="<|tool_call|>[", between=", ", end="]"),
    "llama": CallForm(before_arguments=', "parameters": '),
}
"""Forms by the name of a markup, or of a renderer with that markup."""


def find_form(markup: str, template: str) -> CallForm | None:
    """The form in which a policy is made to call, of its markup and its template's words; None = none is known."""
    if markup == "mistral" and "[ARGS]" in template:
        return _MISTRAL_NAMES
    if markup == "llama" and "parameters" not in template:  # its calls are Python
        return None
    return FORMS.get(markup)
