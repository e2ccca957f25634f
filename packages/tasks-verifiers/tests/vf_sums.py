"""Tasksets of verifiers 0.4 for these tests, which the process imports: sums, and what it cannot do."""

import itertools
import os
import random
import signal
import time

import verifiers.v1 as vf

__all__ = ["Sums"]


class SumData(vf.TaskData):
    answer: int


class Sum(vf.Task[SumData]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        print("what a taskset prints is no answer")
        reply = trace.last_reply
        if reply == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if reply == "hang":
            time.sleep(600)
        if reply == "raise":
            raise KeyError("gold")
        if reply == "nan":
            return float("nan")
        return float(reply.endswith(str(self.data.answer)))

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(len(trace.assistant_messages))


class SandboxedSum(Sum):
    @vf.reward(weight=1.0)
    async def tests(self, trace: vf.Trace, runtime: vf.Runtime) -> float:
        return 1.0


class ContainedSum(Sum):
    NEEDS_CONTAINER = True


class SumsConfig(vf.TasksetConfig):
    kind: str = "plain"
    seed: int = 0
    size: int = 300


class Sums(vf.Taskset[Sum, SumsConfig]):
    def __init__(self, config: SumsConfig) -> None:
        super().__init__(config)
        self.INFINITE = config.kind == "infinite"

    def load(self):
        rng = random.Random(time.time_ns() if self.config.kind == "unsteady" else self.config.seed)
        kind = {"sandboxed": SandboxedSum, "contained": ContainedSum}.get(self.config.kind, Sum)
        for _ in itertools.count() if self.INFINITE else range(self.config.size):
            first, second = rng.randrange(1000), rng.randrange(1000)
            system = "Add." if self.config.kind == "system" else None
            yield kind(SumData(prompt=f"What is {first} + {second}?", system_prompt=system, answer=first + second))
