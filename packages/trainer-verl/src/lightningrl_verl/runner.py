"""The runner inside the Ray cluster: verl's trainer in a thread of one actor, fed by our agent-loop manager.

    driver                        Runner actor
    learn(samples) ───────────►   BatchManager.submit ─► rows ─► TransferQueue ─► PPOTrainer.fit (thread) ─► actor,
           ◄── version, metrics ──┘                                     │                  critic, weight transfer
                                                                        └─ asks for the next batch: the step is over

verl's step wants prompts; ours is one prompt without text, whose "rollouts" are the rows of one `learn`.
"""

from __future__ import annotations

import logging
import math
import os
import random
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson
import ray
import transfer_queue as tq
from torch.utils.data import Dataset
from verl.single_controller.ray import RayWorkerGroup
from verl.trainer.ppo.v1 import get_trainer_cls, trainer_base
from verl.utils.import_utils import load_class_from_fqn
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from lightningrl.errors import BackendError
from lightningrl.types import Sample
from lightningrl_verl.rows import build_rows
from lightningrl_verl.sampler import TrainingOver
from lightningrl_verl.verl_config import NEVER_ENDS

__all__ = ["BatchManager", "EndlessPrompts", "Learned", "Runner"]

logger = logging.getLogger(__name__)

_STOP_S = 30.0
MEETING_PORTS: Final = range(20_000, 30_000)
"""Between those of Ray's workers and those that Linux gives to outgoing connections."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Learned:
    """Outcome of one learning step."""

    version: int
    """Version of the weights that the replicas serve now."""
    rows: int
    seconds: float
    seconds_rows: float
    """Part of `seconds` for making rows and putting them into TransferQueue."""
    metrics: dict[str, float]
    """verl's own, by verl's names."""


class EndlessPrompts(Dataset[dict[str, Any]]):
    """verl's data set (`data.custom_cls`): textless prompts, as many as are asked for. The tasks are LightningRL's."""

    def __init__(self, **_: Any) -> None:
        pass

    def __len__(self) -> int:
        return NEVER_ENDS

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "raw_prompt": [{"role": "user", "content": ""}],
            "data_source": "lightningrl",
            "index": index,
            "reward_model": {},
        }


class BatchManager:
    """verl's agent-loop manager (`agent_loop_manager_class`): prompts that verl wants wait for a `learn`'s rows."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self._wanted: deque[str] = deque()

    @classmethod
    def create(
        cls, config: Any, llm_client: Any, teacher_client: Any = None, reward_loop_worker_handles: Any = None
    ) -> BatchManager:
        """verl's constructor. The engine takes the client from the trainer; teachers and reward models are not ours."""
        return cls(config)

    def generate_sequences(self, prompts: Any) -> None:
        """verl wants a batch for each of these prompts; returns at once."""
        self._wanted.extend(str(getattr(uid, "data", uid)) for uid in prompts["uid"])

    def submit(
        self, samples: Sequence[Sample], *, step: int, minibatches: int, scale: float, as_reward: bool, ranks: int
    ) -> int:
        """Put a step's rows into TransferQueue; returns how many. verl picks them up once its turn is given."""
        prompt = self._wanted.popleft()
        rows = build_rows(samples, prompt, step, scale=scale, as_reward=as_reward)
        self._fit_to(len(rows.keys), minibatches, ranks, rows.temperature)
        tq.kv_batch_put(
            keys=rows.keys, fields=list_of_dict_to_tensordict(rows.fields), tags=rows.tags, partition_id="train"
        )
        tq.kv_put(key=prompt, partition_id="train", tag={"status": "finished"})
        return len(rows.keys)

    def _fit_to(self, rows: int, minibatches: int, ranks: int, temperature: float) -> None:
        """Have verl's next step make `minibatches` updates of these rows. It reads both settings anew in each step; a
        fixed mini-batch size would make a rollout's number of rows the number of updates."""
        size = math.ceil(rows / minibatches / ranks) * ranks
        self.config.actor_rollout_ref.actor.ppo_mini_batch_size = size
        self.config.critic.ppo_mini_batch_size = size
        self.config.actor_rollout_ref.rollout.temperature = temperature


@ray.remote
class Runner:
    """One actor that owns verl's trainer: LightningRL's task runner."""

    def __init__(self, config: Any) -> None:
        self._config = config
        self._log = Path(tempfile.mkdtemp(prefix="lightningrl-verl-")) / "metrics.jsonl"
        self._read = 0
        """Bytes of the log that were read."""
        self._trainer: Any = None
        self._manager: BatchManager | None = None
        self._thread = threading.Thread(target=self._fit, name="verl-fit", daemon=True)
        self._failure: BaseException | None = None
        self._is_set_up = threading.Event()

    def start(self) -> int:
        """Load models, start replicas, hand them the weights. Returns their version once verl waits for a batch."""
        self._thread.start()
        self._is_set_up.wait()
        if self._failure is not None:
            raise self._failure
        self._trainer.replay_buffer.turns.wait_begun()
        return int(self._trainer.global_steps) - 1

    def client(self) -> Any:
        """verl's handle to the replicas (`LLMServerClient`)."""
        return self._trainer.get_llm_client()

    def learn(self, samples: Sequence[Sample], *, minibatches: int, scale: float, as_reward: bool) -> Learned:
        """One step of verl's trainer on these samples; returns when the replicas serve its weights."""
        began = time.monotonic()
        turns = self._trainer.replay_buffer.turns
        if self._manager is None or not turns.wait_begun():
            raise BackendError("verl's trainer has ended; it made all the steps of its schedule: raise total_steps")
        step = int(self._trainer.global_steps)
        ranks = int(self._trainer.actor_rollout_wg.world_size)
        rows = self._manager.submit(
            samples, step=step, minibatches=minibatches, scale=scale, as_reward=as_reward, ranks=ranks
        )
        seconds_rows = time.monotonic() - began
        turns.give()
        is_waiting = turns.wait_begun()
        version = int(self._trainer.global_steps) - (1 if is_waiting else 0)
        seconds = time.monotonic() - began
        return Learned(
            version=version, rows=rows, seconds=seconds, seconds_rows=seconds_rows, metrics=self._metrics(step)
        )

    def save(self, folder: str) -> None:
        """Write actor and critic in the layout that verl resumes from; called while verl waits for a batch."""
        trainer = self._trainer
        step = int(trainer.global_steps) - 1
        trainer.actor_rollout_wg.save_checkpoint(str(Path(folder) / "actor"), None, step, max_ckpt_to_keep=None)
        if trainer.use_critic:
            trainer.critic_wg.save_checkpoint(str(Path(folder) / "critic"), None, step, max_ckpt_to_keep=None)

    def stop(self) -> None:
        """End verl's loop, close TransferQueue and give the GPUs back; the actor may be killed afterwards."""
        if self._trainer is not None:
            self._trainer.replay_buffer.turns.end()
        self._thread.join(_STOP_S)
        for group in self._placement_groups():
            ray.util.remove_placement_group(group)

    def _placement_groups(self) -> list[Any]:
        """Ray keeps them, with verl's fixed names, until the whole job ends; the next trainer could make none."""
        pools = list(getattr(getattr(self._trainer, "resource_pool_manager", None), "resource_pool_dict", {}).values())
        for manager in ("llm_server_manager", "standalone_server_manager"):
            replicas = getattr(getattr(self._trainer, manager, None), "rollout_replicas", [])
            pools += [replica.resource_pool for replica in replicas if replica.resource_pool is not None]
        return [group for pool in pools for group in pool.pgs or ()]

    def _fit(self) -> None:
        """verl's whole run: queue, trainer, manager, loop (as verl/trainer/main_ppo.py TaskRunnerV1.run)."""
        from omegaconf import OmegaConf

        os.environ["VERL_FILE_LOGGER_PATH"] = str(self._log)
        config = self._config
        OmegaConf.resolve(config)
        config.transfer_queue.enable = True
        trainer_base.RayWorkerGroup = meeting_elsewhere
        try:
            tq.init(config.transfer_queue)
            self._trainer = get_trainer_cls(config.trainer.v1.trainer_mode)(config=config)
            self._trainer.init()
            manager_class = load_class_from_fqn(
                config.actor_rollout_ref.rollout.agent.agent_loop_manager_class, "AgentLoopManager"
            )
            self._manager = manager_class.create(config=config, llm_client=self._trainer.get_llm_client())
            self._is_set_up.set()
            self._trainer.fit(self._manager)
            self._trainer.replay_buffer.turns.end()
        except TrainingOver:
            logger.info("verl's loop has ended")
        except BaseException as error:  # noqa: BLE001  the thread's boundary: whoever waits for a turn raises it
            self._failure = error
            if self._trainer is not None:
                self._trainer.replay_buffer.turns.end(error)
        finally:
            self._is_set_up.set()
            tq.close()  # does nothing where it was not opened

    def _metrics(self, step: int) -> dict[str, float]:
        """Metrics that verl logged for the step; none where it is not over (several updates between two transfers)."""
        with self._log.open("rb") as log:
            log.seek(self._read)
            lines = log.read().splitlines()
            self._read = log.tell()
        last: dict[str, Any] = orjson.loads(lines[-1]) if lines else {"step": None}
        if last["step"] != step:
            return {}
        return {name: float(value) for name, value in last["data"].items() if isinstance(value, int | float)}


def meeting_elsewhere(**settings: Any) -> RayWorkerGroup:
    """A worker group whose ranks meet at a port that no client takes meanwhile: by itself verl chooses one of those
    that Linux gives to outgoing connections, up to a minute before it listens there."""
    first = random.choice(MEETING_PORTS)  # noqa: S311  two groups are not to choose alike
    return RayWorkerGroup(master_port_range=[first, MEETING_PORTS.stop + 1000], **settings)
