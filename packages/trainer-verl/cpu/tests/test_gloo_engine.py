"""The gloo checkpoint engine carries weights between processes."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

pytestmark = pytest.mark.filterwarnings(
    "ignore:Ray state API is no longer experimental:DeprecationWarning"
)  # verl's import


def test_weights_arrive_in_another_process_as_they_were_sent(run_process: Callable[..., str]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    with ThreadPoolExecutor(2) as pool:
        sender = pool.submit(run_process, "process_gloo.py", "0", port)
        receiver = pool.submit(run_process, "process_gloo.py", "1", port)
        sender.result()
        received = json.loads(receiver.result().splitlines()[-1])
    assert received == [
        ["a", "torch.float32", [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]],
        ["b", "torch.float32", []],
        ["c", "torch.int32", 7],
    ]


def test_only_the_first_trainer_rank_and_the_replicas_join_the_transfer() -> None:
    from lightningrl_verl_cpu.checkpoint_engine import GlooCheckpointEngine

    actors, replicas = GlooCheckpointEngine.build_topology(3, 2, [{"host": "h", "port": 1}, {}, {}])
    assert actors["rank"] == [0, -1, -1]
    assert replicas["rank"] == [1, 2]
    assert {*actors["world_size"], *replicas["world_size"]} == {3}
