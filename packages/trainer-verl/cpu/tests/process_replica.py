"""verl's two sides of the transformers replica with Ray between them: prints, as JSON, what a call says before and
after an update.

usage: process_replica.py POLICY
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import ray
import verl
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.replica import get_rollout_replica_class

from lightningrl_verl_cpu import overrides
from lightningrl_verl_cpu.settings import REPLICA

POLICY = sys.argv[1]
config: Any = OmegaConf.load(Path(verl.__path__[0]) / "trainer/config/_generated_ppo_trainer.yaml")
for key, value in overrides("transformers", gpus=1, critic=False, reference=False).items():
    OmegaConf.update(config, key, value, force_add=True)
config.actor_rollout_ref.model.path = POLICY
rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model


async def main() -> None:
    replica = get_rollout_replica_class(REPLICA)(0, rollout, model, gpus_per_node=1)
    await replica.launch_servers()
    os.environ["RANK"] = "0"
    adapter = get_rollout_class(REPLICA)(rollout, model, None)

    async def ask() -> Any:
        params = {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True}
        return await replica.server_handle.generate.remote(prompt_ids=[5, 6, 7], sampling_params=params, request_id="r")

    before = await ask()
    await replica.sleep()
    await adapter.resume(["weights"])
    trained = {name: value * 1.5 for name, value in AutoModelForCausalLM.from_pretrained(POLICY).state_dict().items()}
    await adapter.update_weights(iter(trained.items()), global_steps=4)
    await adapter.resume(["kv_cache"])
    after = await ask()
    print(json.dumps([[len(o.token_ids), o.log_probs, o.stop_reason, o.extra_fields] for o in (before, after)]))


ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
asyncio.run(main())
ray.shutdown()
