"""Metric sinks: where a run's numbers go, and the learning curve drawn from them.

loop ─► log(step, metrics) ─► metrics.jsonl (always) · tensorboard · wandb · trackio      metrics.jsonl ─► curve.png
"""

from lightningrl_training.loggers.build import build_loggers
from lightningrl_training.loggers.curve import draw_curve
from lightningrl_training.loggers.jsonl import JsonlLogger
from lightningrl_training.loggers.protocol import MetricLogger

__all__ = ["JsonlLogger", "MetricLogger", "build_loggers", "draw_curve"]
