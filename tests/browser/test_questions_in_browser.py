"""Questions that a stranger has, asked of the site's own search in a real Chromium: the page that answers is the first
hit, and its first block is a command."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chromium import LAUNCH, needs_chromium
from sizes import PATIENCE_S

sync_api = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed: make test-browser installs it"
)

pytestmark = needs_chromium
ROOT = Path(__file__).resolve().parents[2]
QUESTIONS = {
    "how do I use my jsonl": "how-to/tasks",
    "what learning rate": "how-to/choose-settings",
    "out of memory": "how-to/out-of-memory",
    "tools refused": "how-to/tools-refused",
    "reward stays 0": "how-to/it-does-not-learn",
    "resume": "how-to/resume",
    "W&B": "how-to/loggers",
    "deploy to Ollama": "how-to/deploy",
    "more GPUs": "how-to/more-gpus",
    "is my reward hackable": "how-to/is-my-reward-hackable",
}
LATER = {
    "my GGUF has no chat template": "reference/models",
    "how to write a chat template for gemma": "reference/models",
    "how many GPUs do I need for 7B": "how-to/more-gpus",
    "export to ollama": "how-to/deploy",
    "temperature of sampling": "how-to/choose-settings",
    "multi-turn tool calls credit": "explanation/credit/index",
    "attach rewards to imported traces": "how-to/import-traces",
    "curate with my own reward": "how-to/curate",
    "I have no answers": "how-to/no-answers",
    "tool-calling LangGraph agent": "tutorials/tool-calling",
    "reward is always 0": "how-to/it-does-not-learn",
    "resume after kill": "how-to/resume",
    "stop training early": "how-to/evaluation",
    "LangGraph recursion limit": "how-to/agents/langchain",
    "W&B offline": "how-to/loggers",
    "compare two runs": "how-to/sweeps",
    "import LangSmith": "how-to/import-traces",
    "learning rate for 135M": "how-to/choose-settings",
    "use an LLM judge": "explanation/credit/judge",
    "validation every": "reference/recipe",
}
"""Questions of a later stranger, whose pages need not begin with a command."""
SETTLED_MS = 1500
COMMAND = re.compile(r"^(?:\w+=\S+ )*(?:lightningrl|pip|sbatch|docker) ")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def start_page(site: Path) -> Iterator[Any]:
    """The start page as a file, for the site's search works without a server."""
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(**LAUNCH)
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.set_default_timeout(PATIENCE_S * 1000)
        page.goto((site / "index.html").as_uri())
        yield page
        browser.close()


def hits(page: Any, question: str) -> list[str]:
    """The pages that the search lists, best first."""
    page.reload()
    page.locator(".md-search__input").press_sequentially(question)
    page.wait_for_selector(".md-search-result__item", state="attached")
    page.wait_for_timeout(SETTLED_MS)  # the list is made anew after each letter, and says not for which
    addresses = page.eval_on_selector_all(".md-search-result__item", "all => all.map((e) => e.querySelector('a').href)")
    return [re.sub(r"^.*/site\d*/|\.html.*$", "", address) for address in addresses]


@pytest.mark.parametrize(("question", "answer"), (QUESTIONS | LATER).items(), ids=QUESTIONS | LATER)
def test_a_question_is_answered_by_the_first_hit(question: str, answer: str, start_page: Any) -> None:
    assert hits(start_page, question)[0] == answer


@pytest.mark.parametrize("answer", QUESTIONS.values())
def test_the_answer_begins_with_a_question_and_a_command(answer: str) -> None:
    text = (ROOT / "docs" / f"{answer}.md").read_text(encoding="utf-8")
    head, _, rest = text.partition("```")
    assert re.match(r"# .+\n\n\*.+\*", head), "a title, then the question in italics"
    assert len([line for line in head.splitlines() if line.strip()]) <= 5
    assert any(COMMAND.match(line) for line in rest.partition("```")[0].splitlines()[1:3])
