"""Exports a policy as a transformers folder that names each token where answers ended; other forms are made of it.

checkpoint ─► folder, with the run's stops, template and sampling ─┬─► GGUF file
           └► adapter, with the base that its reader has to get    └─► hub, asked first
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightningrl.errors import ConfigError, LightningError, RunFolderError
from lightningrl.plugins import load_plugins
from lightningrl_runs.model_files import PACKAGE, model_format, origin_of
from lightningrl_runs.origin import RunOrigin
from lightningrl_server.rendering.families import template_of
from lightningrl_server.rendering.renderer import PolicyRenderer
from lightningrl_server.rendering.tokenizer import load_tokenizer
from lightningrl_training import policies
from lightningrl_training.build import build_backends
from lightningrl_training.checkpoints import find_checkpoint
from lightningrl_training.export_check import check_export
from lightningrl_training.exported_settings import (
    describe,
    fix_template,
    read_json,
    set_sampling,
    write_card,
    write_json,
)
from lightningrl_training.models import own_template

__all__ = ["ExportForm", "check_upload", "export_policy", "name_base", "name_stops", "open_to_readers", "stop_tokens"]

CARRIED = ("bos_token_id", "pad_token_id")
"""Tokens taken from the model's configuration where it had no generation configuration, whose readers ask it alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportForm:
    """The form in which weights leave a run."""

    dtype: str | None = None
    """Numbers of a folder's weights: `float32`, `bfloat16` or `float16`; None = those of the starting folder."""
    gguf: str | None = None
    """Precision of a GGUF file, which is written instead of a folder: `f16`, `q8_0`, `bf16`, `f32`."""
    adapter: bool = False
    """Write what LoRA learned alone, as a folder that `peft` loads."""
    hub: str | None = None
    """OWNER/NAME of the hub, where what was written is sent."""


def export_policy(
    run: Path,
    origin: RunOrigin,
    target: Path,
    form: ExportForm,
    *,
    policy: str | None,
    step: str | int | None,
    check: int = 0,
) -> int:
    """Write a trained policy's weights of a run's checkpoint to `target`, as `Run.export` says. Returns the step that
    they are of. Raises ConfigError or RunFolderError."""
    recipe, name = origin.recipe, policy or origin.recipe.policy.name
    trained = [each for each, config in recipe.all_policies.items() if config.trainable]
    if name not in trained:
        raise ConfigError(f"no policy {name!r} is trained in run {str(run)!r}; choose one of: {', '.join(trained)}")
    _check_form(target, form, origin.models[name])
    find_checkpoint(run, step)
    if form.gguf is None:
        taken = _write_folder(run, origin, target, form, name, step)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as scratch:
            taken = _write_folder(run, origin, Path(scratch) / "folder", form, name, step)
            model_format("gguf").write(Path(scratch) / "folder", target, form.gguf)
    if check:
        config = recipe.all_policies[name]
        renderer = PolicyRenderer(
            origin.models[name],
            config.renderer,
            name=name,
            template_kwargs=config.chat_template_kwargs,
            chat_template=own_template(name, config, recipe.folder),
        )
        base = origin.models[name] if form.adapter else None
        check_export(run, target, policy=name, step=taken, count=check, renderer=renderer, base=base)
    if form.hub is not None:
        upload(form.hub, target)
    return taken


def _check_form(target: Path, form: ExportForm, model: str) -> None:
    """Raise ConfigError or RunFolderError for a form that cannot be written, before any weights are loaded."""
    if form.gguf is not None:
        if form.adapter or form.dtype is not None:
            other = "--adapter" if form.adapter else "--dtype"
            raise ConfigError(f"--gguf writes whole weights in a precision of its own; leave out {other}, or --gguf")
        if target.suffix != ".gguf":
            raise ConfigError(f"--gguf writes a file, and {str(target)!r} does not end in .gguf; name it {target}.gguf")
        if target.exists():
            raise RunFolderError(f"file {str(target)!r} is there already; give another name")
        if Path(model).is_dir():  # else the hub's cache, which the folder's own check looks into later
            model_format("gguf").write(Path(model), None, form.gguf)
    elif target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise RunFolderError(f"folder {str(target)!r} is not empty; give another")
    if form.hub is not None:
        check_upload(form.hub)


def _write_folder(run: Path, origin: RunOrigin, into: Path, form: ExportForm, name: str, step: str | int | None) -> int:
    recipe = origin.recipe
    rights = into.stat().st_mode if into.exists() else None
    config = recipe.all_policies[name]
    template = own_template(name, config, recipe.folder)
    stops = stop_tokens(origin.models[name], config.renderer, name=name, chat_template=template)
    backend = build_backends(recipe, load_plugins(), origin.models, will_run=False)[name]()
    try:
        while True:
            saved = find_checkpoint(run, step)
            try:
                policies.load_backend(backend, saved.folder, name)
                break
            except (OSError, LightningError):
                if saved.folder.exists():  # else the run has made newer ones meanwhile, and this one went
                    raise
        backend.export(into, dtype=form.dtype, adapter=form.adapter)
        sampling, switches = recipe.sampling.settings(), config.chat_template_kwargs
        notes = describe(sampling, switches)
        if form.adapter:
            name_base(into, config.model, origin.models[name], notes)
            if template is None and switches:  # an adapter's folder has no tokenizer to read it from
                template = template_of(load_tokenizer(origin.models[name]))
        else:
            title = f"Policy `{name}` of the run of recipe `{recipe.name}`, after step {saved.state.step}."
            write_card(into, ["library_name: transformers"], title, notes)
        name_stops(into, stops)
        fix_template(into, template, switches)
        set_sampling(into, sampling)
        open_to_readers(into)
        if rights is not None:
            into.chmod(rights)
    finally:
        backend.close()
    return saved.state.step


def open_to_readers(folder: Path) -> None:
    """The same rights for every file: some libraries write weights for their owner alone."""
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


def stop_tokens(model: str, renderer: str, *, name: str, chat_template: str | None = None) -> tuple[int, ...]:
    """Tokens that end an answer of a run's policy, beside those that the model names itself. Raises ConfigError."""
    return PolicyRenderer(model, renderer, name=name, chat_template=chat_template).stop_token_ids


def name_stops(folder: Path, stop_token_ids: Sequence[int]) -> None:
    """Add tokens to the end-of-text tokens of a folder's generation configuration. Stop strings stay the agent's."""
    config, path = read_json(folder / "config.json"), folder / "generation_config.json"
    generation = read_json(path) or {name: config[name] for name in CARRIED if config.get(name) is not None}
    stops = list(dict.fromkeys([*_ids(generation), *_ids(config), *stop_token_ids]))
    if not stops or stops == _ids(generation):
        return
    generation.pop("_from_model_config", None)  # by which transformers would make it anew from the model's
    generation["eos_token_id"] = stops if len(stops) > 1 else stops[0]
    write_json(path, generation)


def name_base(folder: Path, wanted: str, model: str, notes: Sequence[str] = ()) -> None:
    """Name an adapter's base as its reader finds it: a hub name, or what the recipe says (`wanted`) of a model file,
    whose folder, `model`, is this machine's cache. A README in place of peft's has the lines that load
    both, and the `notes`."""
    origin = origin_of(model)
    base = model if origin is None else wanted
    path = folder / "adapter_config.json"
    write_json(path, {**read_json(path), "base_model_name_or_path": base})
    head = ["library_name: peft"]
    if not Path(model).is_absolute():  # the hub takes no other base
        head = [f"base_model: {base}", *head]
    lines, place = [], json.dumps(base)
    if origin is not None:
        file = Path(str(origin["file"]))
        parent = json.dumps(str(file.parent))
        if wanted.startswith(PACKAGE):
            module = wanted.removeprefix(PACKAGE).partition("/")[0].replace("-", "_")
            lines = ["from importlib.resources import files", ""]
            inner = file.parent.parts[len(file.parent.parts) - file.parent.parts[::-1].index(module) :]
            parent = f"str(files({module!r}){''.join(f' / {part!r}' for part in inner)})".replace("'", '"')
        place = f"{parent}, gguf_file={json.dumps(file.name)}"
    lines += ["from peft import PeftModel", "from transformers import AutoModelForCausalLM, GenerationConfig", ""]
    lines += [f"base = AutoModelForCausalLM.from_pretrained({place})"]
    if notes:
        lines += ['base.generation_config = GenerationConfig.from_pretrained(".")  # samples and stops as the run did']
    lines += ['policy = PeftModel.from_pretrained(base, ".")  # "." is the folder that this file is in']
    write_card(folder, head, f"LoRA adapters for `{base}`.", ["\n".join(["```python", *lines, "```"]), *notes])


def _ids(config: dict[str, Any]) -> list[int]:
    ids = config.get("eos_token_id")
    return [ids] if isinstance(ids, int) else list(ids or ())


def check_upload(name: str) -> None:
    """Raise ConfigError where this machine cannot write to `name`, OWNER/NAME, of the hub: a name that is none, no
    token, no network, no right."""
    from huggingface_hub import HfApi, constants, get_token
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        validate_repo_id(name if "/" in name else f"/{name}")
    except HFValidationError:
        raise ConfigError(f"{name!r} names no place of the hub; write OWNER/NAME, for example me/my-model") from None
    if constants.HF_HUB_OFFLINE:
        raise ConfigError(f"{name!r} cannot be sent: HF_HUB_OFFLINE keeps this machine from the hub; unset it")
    if get_token() is None:
        raise ConfigError(
            f"{name!r} cannot be sent: this machine has no token of the hub; log in with `hf auth login`, or set "
            "HF_TOKEN"
        )
    try:
        HfApi().whoami()
    except HfHubHTTPError as error:
        raise ConfigError(
            f"{name!r} cannot be sent: the hub does not take this machine's token "
            f"({' '.join(str(error).split())[:160]}); log in again with `hf auth login`"
        ) from None
    except Exception as error:  # noqa: BLE001  whatever its HTTP library raises where there is no network
        raise ConfigError(
            f"{name!r} cannot be sent: the hub does not answer ({' '.join(str(error).split())[:160]}); export without "
            "--push-to-hub, and send it later with `hf upload`"
        ) from None


def upload(name: str, place: Path) -> str:
    """Send a folder, or a file, to a repository of the hub, which is made where it is not there: for its owner alone.
    Returns its address. Raises ConfigError; what was written stays."""
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        address = str(api.create_repo(name, exist_ok=True, private=True))
        if place.is_dir():
            api.upload_folder(repo_id=name, folder_path=place)
        else:
            api.upload_file(repo_id=name, path_or_fileobj=place, path_in_repo=place.name)
    except Exception as error:  # noqa: BLE001  the hub's, its HTTP library's, the disk's
        raise ConfigError(
            f"{str(place)!r} was written but not sent to {name!r} ({' '.join(str(error).split())[:160]}); send it with "
            f"`hf upload {name} {place}`"
        ) from None
    return address
