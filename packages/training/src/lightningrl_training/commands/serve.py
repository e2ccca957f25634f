"""`lightningrl serve`: the policy behind an endpoint, untrained, with a base URL and key that any OpenAI client can use
at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lightningrl.console import cancel_on_signals
from lightningrl.errors import ConfigError
from lightningrl.keys import worker_key
from lightningrl.plugins import load_plugins
from lightningrl_client.commands import OptionalRecipeArgument, SetOption, read_settings
from lightningrl_training.commands.printing import Page
from lightningrl_training.commands.stopping import scratch_folder

if TYPE_CHECKING:
    from lightningrl.recipe import Recipe
    from lightningrl_training.build import Parts
    from lightningrl_training.serving import RunningServices

__all__ = ["serve"]

DAY_S = 24 * 3600.0
BY_HAND = "by-hand"
"""The rollout of whoever tries the endpoint by hand; it answers below `/v1`."""


def serve(
    recipe: OptionalRecipeArgument = None,
    run: Annotated[Path | None, typer.Option("--run", help="Serve the newest checkpoint of this run folder.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 = any free one.", min=0, max=65535)] = 8600,
    store_url: Annotated[
        str | None,
        typer.Option(help="A PostgreSQL database for what is served, in a schema of its own that goes in the end."),
    ] = None,
    settings: SetOption = None,
) -> None:
    """Serve the policy behind an OpenAI-compatible endpoint without training it, and print a base URL and key to try it
    with.

    Workers on this or other machines join with `lightningrl work`.
    """
    import asyncio

    from lightningrl_client.recipe_file import load_recipe, with_settings
    from lightningrl_runs.origin import RunOrigin
    from lightningrl_training.checkpoints import find_checkpoint

    if (recipe is None) == (run is None):
        raise ConfigError("give either a RECIPE, whose starting policy is served, or --run, whose newest checkpoint is")
    page, chosen, weights = Page(), read_settings(settings, {"store_url": store_url}), None
    if run is not None:
        # the folder may be somebody else's: its database is not taken from it
        served = with_settings(RunOrigin.read(run).recipe, {"store_url": None, "runtime.servers": 1, **chosen})
        weights = find_checkpoint(run, "newest").folder
    else:
        assert recipe is not None
        served = load_recipe(recipe, chosen)
    try:
        with scratch_folder("lightningrl-serve-") as scratch:
            asyncio.run(_serve(served, weights, scratch, host, port, page))
    except asyncio.CancelledError:
        page.print("stopped")


async def _serve(recipe: Recipe, checkpoint: Path | None, scratch: Path, host: str, port: int, page: Page) -> None:
    from lightningrl_training.build import Parts
    from lightningrl_training.models import check_on_hub
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
    import asyncio

    from lightningrl.types import RolloutMode, RolloutSpec, Task

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
