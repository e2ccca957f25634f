"""Prints, as JSON, what importing verl has done to this process."""

import json
import os

import verl.utils.distributed
import verl.utils.model
from verl.plugin.platform import PlatformRegistry, get_platform
from verl.workers.rollout.replica import RolloutReplicaRegistry

facts = {
    "platforms": PlatformRegistry.registered_names(),
    "replicas": sorted(RolloutReplicaRegistry._registry),
    "sdpa": verl.utils.model.load_valuehead_model.__module__,
    "engines": os.environ.get("VERL_ENGINE_DEVICE"),
    "gloo": type(verl.utils.distributed.initialize_global_process_group_ray).__name__,
}
if "cpu" in facts["platforms"]:
    platform = get_platform()
    facts["device"] = str(platform.current_device())
    facts["memory"] = platform.device_module.max_memory_allocated()
print(json.dumps(facts))
