"""Check of a recipe: one sentence for each thing that verl cannot honour, or this machine cannot run. Made before
anything heavy starts. Imports neither torch, Ray nor verl."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from lightningrl.errors import BackendError, ConfigError
from lightningrl.recipe import Recipe
from lightningrl_verl.settings import Settings

__all__ = ["check_companions", "check_machine", "check_recipe", "check_versions", "has_gpu", "runs_on_cpu"]

VERL = SpecifierSet(">=0.9.1,<0.10")
TRANSFER_QUEUE = SpecifierSet(">=0.1.10,<0.2")


def check_recipe(recipe: Recipe) -> None:
    """Raises ConfigError (settings) or BackendError (this machine)."""
    settings = Settings(policy=recipe.policy.model, name=recipe.policy.name, **recipe.backend_options)
    if recipe.sampling.top_p < 1 or recipe.sampling.top_k > 0:
        raise ConfigError(
            f"sampling.top_p = {recipe.sampling.top_p:g}, sampling.top_k = {recipe.sampling.top_k}: vLLM's logprobs "
            "are of the truncated "
            "distribution and verl's are not, so ratios would be wrong; train with top_p = 1 and top_k = 0"
        )
    if recipe.sampling.temperature == 0:
        raise ConfigError("sampling.temperature = 0: verl divides logits by it; train with a temperature above 0")
    for name, value, term in (("kl_coef", settings.kl_coef, "KL"), ("entropy_coef", settings.entropy_coef, "entropy")):
        if value and recipe.samples.aggregation != "token_mean":
            raise ConfigError(
                f"learner.{name} = {value:g} with samples.aggregation = {recipe.samples.aggregation!r}: verl weighs "
                f"the {term} by "
                f"token; set samples.aggregation = 'token_mean', or {name} = 0"
            )
    weighs = settings.is_corrected or (recipe.loop.max_staleness > 0 and settings.importance_cap is None)
    if settings.kl_coef and weighs:
        raise ConfigError(
            f"learner.kl_coef = {settings.kl_coef:g} with tokens of other weights: verl does not weigh a token's KL by "
            "its importance, as backend 'torch' does; set learner.importance_cap = 0 without any mask, or "
            "kl_coef = 0"
        )
    if settings.is_async and not recipe.loop.max_staleness:
        raise ConfigError(
            f"backends.verl.mode is {settings.mode!r}, and with loop.max_staleness = 0 nothing is sampled while it "
            "learns; set "
            "loop.max_staleness to 1 or more, or mode to 'sync'"
        )
    _check_critic(recipe, settings)
    check_machine(settings)
    if settings.is_averaged and recipe.samples.aggregation != "token_mean":
        raise ConfigError(
            f"learner.loss = {settings.loss!r} is not proportional to the advantages, and verl's rows carry weight "
            "times advantage; set "
            f"samples.aggregation = 'token_mean', not {recipe.samples.aggregation!r}, or use backend 'torch'"
        )


def _check_critic(recipe: Recipe, settings: Settings) -> None:
    """PPO's critic estimates inside one call, so each call is a row of its own with a reward and no baseline."""
    if settings.critic is None:
        return
    if recipe.samples.rows != "call":
        raise ConfigError("backends.verl.critic estimates advantages inside each call; set samples.rows = 'call'")
    if recipe.samples.aggregation != "token_mean":
        raise ConfigError(
            "backends.verl.critic makes the advantages that samples would be weighed by; set samples.aggregation = "
            "'token_mean'"
        )
    if recipe.loop.dynamic_sampling:
        raise ConfigError(
            "backends.verl.critic learns from calls of reward 0, which "
            f"loop.dynamic_sampling = {recipe.loop.dynamic_sampling} would leave out; set it to 0"
        )
    if recipe.credit.use != "reinforce" or recipe.credit.whiten:
        raise ConfigError(
            f"backends.verl.critic needs each call's plain reward, credit.use = {recipe.credit.use!r} takes a "
            "baseline off; "
            "set credit.use = 'reinforce' without whiten"
        )


def check_machine(settings: Settings) -> None:
    """Versions, GPUs, and the support package where there is none. Raises BackendError."""
    check_versions(settings)
    if runs_on_cpu(settings):  # the support package has verl run with another vLLM
        return
    if settings.address is None:
        if settings.device == "cpu" or not has_gpu():
            raise BackendError(
                "backend 'verl' found no GPU; run where there is one, name a Ray cluster in backends.verl.address, "
                "use backend 'torch', "
                "or, for tests, install packages/trainer-verl/cpu of the source tree"
            )
        _check_gpus(settings)
    check_companions(settings)


def check_versions(settings: Settings, version: Callable[[str], str] = importlib.metadata.version) -> None:
    """The versions that this backend was tested with. Raises BackendError."""
    for name, wanted in (("verl", VERL), ("TransferQueue", TRANSFER_QUEUE)):
        installed = _version(name, version)
        if installed is None:
            raise BackendError(
                f"backend 'verl' needs {name} {wanted}, which is not installed; pip install 'lightningrl[verl]'"
            )
        if Version(installed) not in wanted:
            raise BackendError(
                f"backend 'verl' was made for {name} {wanted} and {installed} is installed; pip install "
                f"'{name}{wanted}'"
            )
    if settings.engine == "vllm" and _version("vllm", version) is None:
        raise BackendError(
            "engine 'vllm' needs vLLM, which is not installed; pip install the vLLM that your verl names (pip "
            "install 'verl[vllm]')"
        )


def check_companions(
    settings: Settings,
    version: Callable[[str], str] = importlib.metadata.version,
    requires: Callable[[str], list[str] | None] = importlib.metadata.requires,
) -> None:
    """The engine and transformers as verl names them. Raises BackendError."""
    for name, wanted in _companions(requires("verl") or (), settings.engine).items():
        installed = _version(name, version)
        if installed is not None and not wanted.contains(installed, prereleases=True):
            raise BackendError(
                f"verl {version('verl')} was made for {name} {wanted} and {installed} is installed; pip install "
                f"'verl[{settings.engine}]'"
            )


def _companions(requirements: Iterable[str], engine: str) -> dict[str, SpecifierSet]:
    """Versions of transformers that verl asks for, whatever its extras say, and of the engine; a version that it
    pins stands for its patch releases (0.24.0 for 0.24.*)."""
    versions: dict[str, SpecifierSet] = {}
    for requirement in map(Requirement, requirements):
        is_engine = (
            requirement.name == engine
            and requirement.marker is not None
            and requirement.marker.evaluate({"extra": engine})
        )
        if is_engine or (requirement.name == "transformers" and requirement.marker is None):
            versions[requirement.name] = SpecifierSet(
                re.sub(r"==(\d+\.\d+)\.[^,]*", r"==\1.*", str(requirement.specifier))
            )
    return versions


def has_gpu() -> bool:
    """An NVIDIA driver is here."""
    return Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi") is not None


def runs_on_cpu(settings: Settings) -> bool:
    """True if verl runs on the CPU: asked for, or with the support package and neither GPU nor cluster here."""
    wanted = settings.device == "cpu" or (settings.device == "auto" and settings.address is None and not has_gpu())
    return wanted and importlib.util.find_spec("lightningrl_verl_cpu") is not None


def _check_gpus(settings: Settings) -> None:
    """One machine of our own; a cluster is asked when it is reached."""
    if settings.nodes + settings.rollout_nodes > 1:
        raise BackendError(
            f"the layout asks for {settings.nodes + settings.rollout_nodes} nodes, and no Ray cluster is named; "
            "set backends.verl.address (see docs/how-to/cluster.md)"
        )
    gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
    if gpus < settings.gpus:
        raise BackendError(
            f"the layout asks for {settings.gpus} GPUs and this machine has {gpus}; lower gpus_per_node, or name a "
            "Ray cluster in "
            "backends.verl.address"
        )


def _version(name: str, version: Callable[[str], str]) -> str | None:
    try:
        return version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
