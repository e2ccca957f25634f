"""Finds a policy's weights, a folder or a name of the hub, and refuses within seconds what cannot be served."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from lightningrl.errors import ConfigError
from lightningrl.recipe import Recipe
from lightningrl.recipe_tables import OtherPolicyConfig, PolicyConfig
from lightningrl_runs.model_files import find_model, read_model
from lightningrl_server.rendering import templates
from lightningrl_server.rendering.families import check_renderer, markup_of, refuse_images
from lightningrl_server.rendering.renderer import PolicyRenderer
from lightningrl_server.rendering.tokenizer import load_tokenizer
from lightningrl_server.rendering.tool_turns import find_tool_turns

__all__ = ["check_lengths", "check_on_hub", "check_rendering", "own_template", "resolve_model"]

HUB_WAIT_S = 5.0
"""Seconds that the hub may take to say whether it has a model."""


def resolve_model(name: str, policy: PolicyConfig | OtherPolicyConfig, folder: Path) -> str:
    """The policy as a hub name, or the absolute path where a folder of that name lies beside the recipe or here; the
    folder of a model file, which is read where it was not yet. Raises ConfigError."""
    if (place := find_model(policy.model, (folder, Path.cwd()))) is not None:
        if place.is_file():
            place = read_model(place, needs_template=_needs_template(policy))
        return str(_checked_folder(place, policy))
    for base in (folder, Path.cwd()):
        if (base / policy.model).is_dir():
            return str(_checked_folder((base / policy.model).resolve(), policy))
    if policy.model.endswith(".gguf"):
        raise ConfigError(
            f"policy {name!r}: no file {policy.model!r} beside the recipe or here; name a GGUF file that is there, or "
            "package:NAME/FILE.gguf for one in an installed package"
        )
    if policy.model.startswith((".", "/", "~")) or policy.model.count("/") > 1:
        raise ConfigError(
            f"policy {name!r}: no folder {policy.model!r}; give a transformers folder, a model file, or a hub name "
            "like 'Qwen/Qwen2.5-0.5B'"
        )
    if "/" not in policy.model and _in_cache(policy.model) is None:
        raise ConfigError(
            f"policy {name!r}: {policy.model!r} is no folder beside the recipe or here, and no hub name, which has an "
            "owner: write for example --policy Qwen/Qwen2.5-0.5B-Instruct, or make a small one: lightningrl init "
            "my-agent"
        )
    return policy.model


def check_on_hub(name: str, model: str) -> None:
    """Raise ConfigError for a hub name of a policy that is neither in the cache nor on the hub, asked for seconds."""
    if Path(model).is_absolute() or _in_cache(model) is not None:
        return
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    absent = f"policy {name!r}: {model!r} is not in this machine's Hugging Face cache"
    fetch = f"fetch it where there is a network (`hf download {model}`), or give a transformers folder"
    if os.environ.get("HF_HUB_OFFLINE", "0").upper() in {"1", "ON", "YES", "TRUE"}:
        raise ConfigError(f"{absent}, and HF_HUB_OFFLINE keeps it from being fetched; unset it, or {fetch}")
    try:
        HfApi().model_info(model, timeout=HUB_WAIT_S)
    except GatedRepoError:
        raise ConfigError(
            f"policy {name!r}: {model!r} is given out on request; ask for it on its page, then `hf auth login`"
        ) from None
    except (RepositoryNotFoundError, HFValidationError):
        raise ConfigError(
            f"policy {name!r}: no folder {model!r} beside the recipe or here, and the hub has no such model for you; "
            "check the spelling, or `hf auth login` where it is a private one"
        ) from None
    except HfHubHTTPError as error:
        raise ConfigError(
            f"{absent}, and the hub answers {' '.join(str(error).split())[:160]!r}; try again, or {fetch}"
        ) from None
    except Exception as error:  # noqa: BLE001  whatever its HTTP library raises where there is no network
        raise ConfigError(
            f"{absent}, and the hub does not answer ({' '.join(str(error).split())[:160]}); {fetch}"
        ) from None


def check_lengths(recipe: Recipe, name: str, model: str) -> None:
    """Raise ConfigError where a policy's completion may be as long as its model's context, so that no prompt fits."""
    limit = recipe.options_of(recipe.all_policies[name]).get("context_length") or _context_length(model)
    too_long = [
        f"{table}.max_tokens is {sampling.max_tokens}, but policy {name!r} reads {limit} tokens, prompt and completion "
        f"together; leave room for the prompt, for example --set {table}.max_tokens={max(1, limit // 4)}"
        for table, sampling in (("sampling", recipe.sampling), ("validation.sampling", recipe.validation.sampling))
        if isinstance(limit, int) and sampling.max_tokens is not None and sampling.max_tokens >= limit
    ]
    if too_long:
        raise ConfigError(*too_long)


def own_template(name: str, policy: PolicyConfig | OtherPolicyConfig, folder: Path) -> str | None:
    """The chat template that the recipe in `folder` puts in place of the model's; None = none. Raises ConfigError."""
    if policy.chat_template is None:
        return None
    if policy.renderer not in ("auto", "default"):
        raise ConfigError(
            f"policy {name!r} has a renderer, {policy.renderer!r}, which writes its prompts, and a chat_template that "
            "nobody would read; leave one of them out"
        )
    return templates.load_template(policy.chat_template, folder, name)


def check_rendering(name: str, policy: PolicyConfig | OtherPolicyConfig, model: str, recipe_folder: Path) -> str | None:
    """Raise ConfigError where the policy's messages cannot become prompts: a renderer that there is not or that does
    not fit, a template that does not compile, switches that it never reads. Returns why it cannot be offered tools;
    None = it can, or a model that was not fetched yet says it later. Reads the tokenizer alone, fetches nothing."""
    check_renderer(policy.renderer, name)
    own, folder = own_template(name, policy, recipe_folder), Path(model)
    # the usual, without a tokenizer
    if policy.renderer == "auto" and not policy.chat_template_kwargs and folder.is_absolute():
        refuse_images(model, name)
        template, added = templates.read_template(folder) or "" if own is None else own, templates.added_tokens(folder)
        templates.check_shipped(policy.chat_template, added, name)
        templates.template_variables(template, f"policy {name!r}")
        markup = markup_of(model, template, added)
        is_written = markup is not None and find_tool_turns(templates.template_text(template), markup) is not None
        return None if is_written else templates.no_tools(name, added)
    if not folder.is_absolute() and not _has_tokenizer(model):
        return None
    renderer = PolicyRenderer(
        load_tokenizer(model, is_there=True),
        policy.renderer,
        name=name,
        template_kwargs=policy.chat_template_kwargs,
        chat_template=own,
    )
    vocabulary = renderer.tokenizer.get_added_vocab()
    templates.check_shipped(policy.chat_template, vocabulary, name)
    return None if renderer.supports_tools else templates.no_tools(name, vocabulary)


def _has_tokenizer(model: str) -> bool:
    return all(_in_cache(model, file) is not None for file in ("tokenizer.json", "tokenizer_config.json"))


def _in_cache(model: str, file: str = "config.json") -> Path | None:
    """A file of a hub model that was fetched before."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(model, file)
    except HFValidationError:
        return None
    return Path(cached) if isinstance(cached, str) else None


def _context_length(model: str) -> int | None:
    """Most tokens of prompt and completion together, where the model's configuration says so."""
    path = Path(model) / "config.json" if Path(model).is_absolute() else _in_cache(model)
    if path is None:
        return None
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    limit = config.get("text_config", config).get("max_position_embeddings")
    return limit if isinstance(limit, int) else None


def _needs_template(policy: PolicyConfig | OtherPolicyConfig) -> bool:
    return policy.renderer == "auto" and policy.chat_template is None


def _checked_folder(folder: Path, policy: PolicyConfig | OtherPolicyConfig) -> Path:
    """A local model folder that can be served: weights' config, fast tokenizer, and chat template or named renderer."""
    for needed in ("config.json", "tokenizer.json"):
        if not (folder / needed).is_file():
            raise ConfigError(
                f"model folder {str(folder)!r} has no {needed}; save model and tokenizer there with save_pretrained"
            )
    settings = folder / "tokenizer_config.json"
    has_template = (folder / "chat_template.jinja").is_file() or (
        settings.is_file() and "chat_template" in json.loads(settings.read_text(encoding="utf-8"))
    )
    if _needs_template(policy) and not has_template:
        raise ConfigError(templates.no_template(f"model folder {str(folder)!r}", templates.added_tokens(folder)))
    return folder
