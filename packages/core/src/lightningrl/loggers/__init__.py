"""Metric sinks: where a run's numbers go, and the learning curve drawn from them.

loop ─► log(step, metrics) ─► metrics.jsonl (always) · tensorboard · wandb · trackio      metrics.jsonl ─► curve.png
"""

from lightningrl.loggers.build import build_loggers
from lightningrl.loggers.curve import draw_curve
from lightningrl.loggers.jsonl import JsonlLogger
from lightningrl.loggers.protocol import MetricLogger

__all__ = ["JsonlLogger", "MetricLogger", "build_loggers", "draw_curve"]
