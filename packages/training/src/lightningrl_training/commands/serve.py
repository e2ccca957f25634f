"""`lightningrl serve`: the policy behind an endpoint, untrained, with a base URL and key that any OpenAI client can use
at once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightningrl.console import cancel_on_signals
from lightningrl.errors import ConfigError
from lightningrl.keys import worker_key
from lightningrl.plugins import load_plugins
from lightningrl.recipe import Recipe
from lightningrl.types import RolloutMode, RolloutSpec, Task
from lightningrl_client.recipe_file import load_recipe, with_settings
from lightningrl_training.build import Parts
from lightningrl_training.checkpoints import find_checkpoint
from lightningrl_training.commands.printing import Page
from lightningrl_training.commands.stopping import scratch_folder
from lightningrl_training.models import check_on_hub
from lightningrl_viewer.reading.origin import RunOrigin

if TYPE_CHECKING:
    from lightningrl_training.serving import RunningServices

__all__ = ["serve_command"]

DAY_S = 24 * 3600.0
BY_HAND = "by-hand"
"""The rollout of whoever tries the endpoint by hand; it answers below `/v1`."""


def serve_command(source: Path | None, *, run: Path | None, host: str, port: int, settings: Mapping[str, Any]) -> None:
    if (source is None) == (run is None):
        raise ConfigError("give either a RECIPE, whose starting policy is served, or --run, whose newest checkpoint is")
    page = Page()
    if run is not None:
        # the folder may be somebody else's: its database is not taken from it
        recipe = with_settings(RunOrigin.read(run).recipe, {"store_url": None, "runtime.servers": 1, **settings})
        saved = find_checkpoint(run, "newest")
    else:
        assert source is not None
        recipe, saved = load_recipe(source, settings), None
    try:
        with scratch_folder("lightningrl-serve-") as scratch:
            asyncio.run(_serve(recipe, saved.folder if saved else None, scratch, host, port, page))
    except asyncio.CancelledError:
        page.print("stopped")


async def _serve(recipe: Recipe, checkpoint: Path | None, scratch: Path, host: str, port: int, page: Page) -> None:
    from lightningrl_training.serving import serve_policy, server_settings

    cancel_on_signals()
    parts = Parts.build(recipe, load_plugins())
    for name, model in parts.models.items():
        check_on_hub(name, model)
    with _scratch_store(recipe.store_url, scratch) as store_url:
        settings = server_settings(recipe, parts, store_url, host=host, port=port).model_copy(
            update={"plain_rollout": BY_HAND}
        )
        async with serve_policy(
            settings, parts, scratch, checkpoint, workers=None, servers=recipe.runtime.servers
        ) as served:
            await _say_and_wait(served, parts, settings.run_key, page)


@contextmanager
def _scratch_store(database: str | None, scratch: Path) -> Iterator[str]:
    """Its URL, for as long as the policy is served."""
    if database is None:
        yield f"sqlite:///{scratch / 'store.sqlite'}"
        return
    from lightningrl_server.store.postgresql import create_schema, drop_schema

    store = create_schema(database, scratch)
    try:
        yield store
    finally:
        drop_schema(store, scratch)


async def _say_and_wait(served: RunningServices, parts: Parts, run_key: str, page: Page) -> None:
    # a rollout of its own for whoever tries the endpoint by hand; the lease lasts a day
    task, mode = Task(id=BY_HAND, input=None), RolloutMode.VALIDATION
    spec = RolloutSpec(id=BY_HAND, task=task, group_id=BY_HAND, mode=mode, timeout_s=DAY_S)
    await served.client.create_rollouts([spec])
    lease = await served.client.lease("serve", lease_s=DAY_S)
    assert lease is not None
    shown = ", ".join(
        f"{name!r} ({parts.models[name]}), version {version}" for name, version in served.policies.versions.items()
    )
    page.print(f"serving {shown}; stop it with Ctrl-C\n")
    page.print(f"export OPENAI_BASE_URL={served.server.url}/v1")
    page.print(f"export OPENAI_API_KEY={lease.key}\n")
    join = f"lightningrl work RECIPE --server {served.server.url}"
    page.print(f"workers join with:  LIGHTNINGRL_KEY={worker_key(run_key)} {join}")
    page.print(f"API description:    {served.server.url}/openapi.json")
    await asyncio.Event().wait()
