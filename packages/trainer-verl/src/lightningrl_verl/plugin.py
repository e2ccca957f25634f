"""Registers the backend and the Ray workers. Imports neither torch, Ray nor verl: the factories do, when asked."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from lightningrl.plugins import Plugin, hookimpl

if TYPE_CHECKING:
    from lightningrl_verl.backend import VerlBackend
    from lightningrl_verl.ray_workers import RayLauncher
    from lightningrl_verl.settings import Settings
    from lightningrl_verl.tuner import VerlTuner

__all__ = [
    "create_backend",
    "create_ray_launcher",
    "create_tuner",
    "lightningrl_trainers",
    "lightningrl_worker_launchers",
]


def create_backend(**settings: Any) -> VerlBackend:
    """A `VerlBackend` of these `Settings`. It starts verl when it is first needed; an export alone needs no GPU."""
    from lightningrl_verl.environment import quiet

    made = _prepare(settings)
    with quiet():
        from lightningrl_verl.backend import VerlBackend

        return VerlBackend(made)


def create_tuner(**settings: Any) -> VerlTuner:
    """A `VerlTuner` of these `Settings`. verl has no linear schedule: a cosine falls to 0 in its place."""
    from lightningrl_verl.environment import quiet

    made = _prepare(settings | ({"schedule": "cosine"} if settings.get("schedule") == "linear" else {}))
    with quiet():
        from lightningrl_verl.tuner import VerlTuner

        return VerlTuner(made)


def _prepare(settings: Mapping[str, Any]) -> Settings:
    """Check versions, and set what verl and Ray read when they are imported."""
    from lightningrl_verl.environment import prepare_environment
    from lightningrl_verl.recipe_check import check_versions
    from lightningrl_verl.settings import Settings

    made = Settings(**settings)
    check_versions(made)
    prepare_environment(made)
    return made


@hookimpl
def lightningrl_trainers() -> Iterable[Plugin]:
    from lightningrl_torch.learner_settings import declare
    from lightningrl_verl.recipe_check import check_recipe
    from lightningrl_verl.settings import Settings

    # for `check_options`, without verl
    for factory in (create_backend, create_tuner):
        factory.__signature__ = inspect.signature(Settings)  # type: ignore[union-attr]
    yield Plugin(
        name="verl",
        summary="verl with vLLM replicas on Ray; FSDP2 or Megatron, one GPU to many nodes",
        factory=create_backend,
        tuner=create_tuner,
        check=check_recipe,
        capabilities=declare(Settings, several_policies=False),
    )


def create_ray_launcher(
    *,
    address: str | None = None,
    num_cpus: float = 0.0,
    resources: Mapping[str, float] | None = None,
    code: Literal["ship", "shared"] = "ship",
    exclude: Sequence[str] = (),
    environment: Sequence[str] = (),
    start_timeout_s: float = 300.0,
) -> RayLauncher:
    """Agent workers spread over the nodes of a Ray cluster; one actor per node supervises those there.

    `address`: `host:port`, `auto` (the Ray of this machine) or `local` (one of our own); None = RAY_ADDRESS, else
    `auto`, else `local`. `num_cpus`, `resources`: what Ray sets aside for each worker; by default nothing, so that the
    trainer's own placement is undisturbed. `code`: `ship` = nodes other than this one get a copy of the recipe's
    folder, at most 100 MiB without `exclude` (patterns of paths, as `data/*`), hidden files and run folders; `shared` =
    the folder lies under the same path on every node. `environment`: names of variables of this process that workers on
    every node get, such as keys of the agent's tools. `start_timeout_s`: how long a worker may wait for a place.
    """
    from lightningrl_verl.ray_workers import RayLauncher

    return RayLauncher(
        address=address,
        num_cpus=num_cpus,
        resources=resources,
        code=code,
        exclude=exclude,
        environment=environment,
        start_timeout_s=start_timeout_s,
    )


@hookimpl
def lightningrl_worker_launchers() -> Iterable[Plugin]:
    yield Plugin(
        name="ray", summary="agent workers are spread over the nodes of a Ray cluster", factory=create_ray_launcher
    )
