"""Which of verl's seams this backend stands on; a newer verl that has moved one is told by name. `check_seams()` runs
before anything starts. A row here is the only place to look at when verl's version is raised."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from collections.abc import Sequence

from lightningrl.errors import BackendError

__all__ = ["SEAMS", "check_seams"]

SEAMS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("verl.trainer.ppo.core_algos", "register_adv_est", ("name_or_enum",)),
    ("verl.trainer.ppo.core_algos", "register_policy_loss", ("name",)),
    (
        "verl.trainer.ppo.core_algos",
        "agg_loss",
        ("loss_mat", "loss_mask", "loss_agg_mode", "dp_size", "batch_num_tokens"),
    ),
    ("verl.trainer.ppo.v1", "get_trainer_cls", ("name",)),
    ("verl.trainer.ppo.v1.trainer_base", "RayWorkerGroup._get_master_addr_port", ("self", "master_port_range")),
    ("verl.trainer.ppo.v1.trainer_base", "PPOTrainer.fit", ("self", "agent_loop_manager")),
    ("verl.trainer.ppo.v1.trainer_base", "PPOTrainer.get_llm_client", ("self",)),
    (
        "verl.trainer.ppo.v1.replay_buffer",
        "ReplayBuffer.sample",
        ("self", "global_steps", "partition_id", "batch_size"),
    ),
    (
        "verl.trainer.ppo.v1.replay_buffer",
        "ReplayBufferAsync.sample",
        ("self", "global_steps", "partition_id", "batch_size"),
    ),
    ("verl.workers.engine_workers", "TrainingWorker.train_batch", ("self", "data")),
    ("verl.workers.engine_workers", "TrainingWorker.infer_batch", ("self", "data")),
    ("verl.workers.engine_workers", "TrainingWorker.set_loss_fn", ("self", "loss_fn")),
    ("verl.workers.rollout.llm_server", "LLMServerClient.__init__", ("self", "config", "load_balancer_handle")),
    ("verl.workers.rollout.router", "GlobalRequestLoadBalancer.acquire_server", ("self", "request_id")),
    ("verl.workers.rollout.router", "GlobalRequestLoadBalancer.release_server", ("self", "server_id")),
    ("verl.workers.rollout.router", "GlobalRequestLoadBalancer.remove_servers", ("self", "server_ids")),
    ("verl.workers.engine.fsdp.transformer_impl", "FSDPEngineWithLMHead.prepare_model_outputs", ("self", "output")),
    ("verl.model_merger.fsdp_model_merger", "FSDPModelMerger._merge_by_placement", ("self", "tensors", "placement")),
    (
        "verl.model_merger.fsdp_model_merger",
        "FSDPModelMerger._load_and_merge_state_dicts",
        ("self", "world_size", "total_shards"),
    ),
    ("verl.model_merger.fsdp_model_merger", "merge_non_dtensor_shards", ("key", "shards")),
    ("verl.utils.tensordict_utils", "list_of_dict_to_tensordict", ()),
    ("verl.utils.config", "validate_config", ("config", "use_reference_policy", "use_critic")),
    ("verl.trainer.constants_ppo", "get_ppo_ray_runtime_env", ("config",)),
    ("transfer_queue", "kv_batch_put", ("keys",)),
    ("transfer_queue", "kv_put", ("key",)),
)
"""Module, name in it, parameters that we pass or rely on."""


def check_seams(seams: Sequence[tuple[str, str, tuple[str, ...]]] = SEAMS) -> None:
    """Raises BackendError naming the seam that is not where it was."""
    for module_name, name, parameters in seams:
        problem = _problem(module_name, name, parameters)
        if problem is not None:
            raise BackendError(
                f"verl {importlib.metadata.version('verl')} has moved a seam: {module_name}.{name} {problem}; "
                "install a verl that this backend was tested with (>=0.9.1,<0.10)"
            )
    _check_registered()


def _problem(module_name: str, name: str, parameters: tuple[str, ...]) -> str | None:
    try:
        target: object = importlib.import_module(module_name)
        for part in name.split("."):
            target = getattr(target, part)
    except (ImportError, AttributeError) as error:
        return f"is gone ({error})"
    accepted = inspect.signature(target).parameters  # type: ignore[arg-type]
    missing = [parameter for parameter in parameters if parameter not in accepted]
    return f"takes no {missing[0]!r} any more" if missing else None


def _check_registered() -> None:
    """verl only logs a plugin that fails to load."""
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY

    from lightningrl_torch.losses import LOSSES
    from lightningrl_verl.losses import ESTIMATOR
    from lightningrl_verl.settings import loss_name

    names = [loss_name(loss) for loss in (*LOSSES, "own")]
    for registry, name in ((ADV_ESTIMATOR_REGISTRY, ESTIMATOR), *((POLICY_LOSS_REGISTRY, name) for name in names)):
        if name not in registry:
            raise BackendError(
                f"verl does not know {name!r} although its plugin entry point was loaded; reinstall lightningrl-verl"
            )
