"""The pages of a run, in the order of the navigation, and those that other packages bring by the hook
`lightningrl_view_pages`."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any, Final

from lightningrl.errors import LightningError, PluginError, describe_raised
from lightningrl.plugins import Plugin, load_plugins
from lightningrl_viewer.page import Page, PageRequest, PageView, ViewedRun
from lightningrl_viewer.pages import credit, group, recipe, rollout, rollouts, run, system
from lightningrl_viewer.runs import FORMS

__all__ = ["PAGES", "all_pages"]

PAGES: tuple[Page, ...] = (
    run.PAGE,
    rollouts.PAGE,
    rollout.PAGE,
    rollout.TEXT,
    group.PAGE,
    credit.PAGE,
    system.PAGE,
    recipe.PAGE,
)


_PATH: Final = re.compile(r"[a-z][a-z0-9-]*")


def all_pages() -> tuple[Page, ...]:
    """Our pages, then those of installed packages. Raises PluginError for a path that is taken or is none."""
    records = load_plugins().records("lightningrl_view_pages")
    return (*PAGES, *map(plugin_page, records.values()))


def plugin_page(record: Plugin) -> Page:
    """Make a page of a plugin's function. An error of it is a sentence on the page."""
    if not _PATH.fullmatch(record.name) or record.name in {*FORMS, *(page.path.partition("/")[0] for page in PAGES)}:
        raise PluginError(
            f"plugin from {record.distribution}: {record.name!r} cannot be the path of a page of the viewer; use "
            "another, "
            "of lower-case letters, digits and dashes"
        )
    render: Callable[[Any], Awaitable[str]] = record.build()

    async def show(viewed: ViewedRun, _: PageRequest) -> PageView:
        from markupsafe import Markup

        try:
            html = await render(viewed.run)
        except LightningError:
            raise
        except Exception as error:
            raise PluginError(
                f"page {record.name!r} of {record.distribution} raised {describe_raised(error)}; mend or uninstall it"
            ) from error
        return PageView("plugin.html", title=record.summary, html=Markup(html))  # noqa: S704 - CSP allows no script

    return Page(record.name, show, name=record.summary)
