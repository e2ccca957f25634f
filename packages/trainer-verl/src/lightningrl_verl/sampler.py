"""Rendezvous of verl's trainer, which waits for rows, with LightningRL's loop, in front of verl's own replay buffers.

    fit thread   sample() ─ begins a turn ─ waits ─────────► rows: verl's own sampling, update, transfer ─► sample() …
    our thread           take() ─► rows into TransferQueue ─► give() ─ waits until the next turn: all of that is done

`trainer.v1.sampler.custom_sampler` is verl's seam for this; verl's own buffers poll TransferQueue every two seconds.
"""

from __future__ import annotations

import threading
from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

__all__ = ["PromptAsyncSampler", "PromptSampler", "TrainingOver", "Turns"]


class TrainingOver(Exception):
    """Raised inside verl's loop to end it: LightningRL's has ended."""


class Turns:
    """Counts the batches that verl asked for and those it was given."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._begun = 0
        self._given = 0
        self._over = False
        self._failure: BaseException | None = None

    def begin(self) -> None:
        """verl's loop: wait for a batch. Raises TrainingOver."""
        with self._changed:
            self._begun += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._over or self._given >= self._begun)
            if self._over:
                raise TrainingOver

    def wait_begun(self, timeout_s: float | None = None) -> bool:
        """Ours: True once verl waits for a batch, False when its loop ended. Raises its error, or TimeoutError."""
        with self._changed:
            came = self._changed.wait_for(
                lambda: self._over or self._failure is not None or self._begun > self._given, timeout_s
            )
            if self._failure is not None:
                raise self._failure
            if not came:
                raise TimeoutError
            return not self._over

    def give(self) -> None:
        """Ours: the batch is in TransferQueue."""
        with self._changed:
            self._given += 1
            self._changed.notify_all()

    def end(self, failure: BaseException | None = None) -> None:
        """Either side: no more turns."""
        with self._changed:
            self._over = True
            self._failure = self._failure or failure
            self._changed.notify_all()


class PromptSampler(ReplayBuffer):  # type: ignore[misc]
    """For the synchronous mode."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{**settings, "poll_interval": 0.05})
        self.turns = Turns()

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> Any:
        self.turns.begin()
        return super().sample(global_steps=global_steps, partition_id=partition_id, batch_size=batch_size)


class PromptAsyncSampler(ReplayBufferAsync):  # type: ignore[misc]
    """For the asynchronous modes."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{**settings, "poll_interval": 0.05})
        self.turns = Turns()

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> Any:
        self.turns.begin()
        return super().sample(global_steps=global_steps, partition_id=partition_id, batch_size=batch_size)
