"""Metric loggers: where a run's numbers go, and the learning curve drawn from them.

loop ─► log(step, metrics) ─► metrics.jsonl (always) · tensorboard · wandb · mlflow · trackio · swanlab · a plugin's
metrics.jsonl ─► curve.png
"""

from lightningrl_training.loggers.curve import draw_curve
from lightningrl_training.loggers.jsonl import JsonlLogger

__all__ = ["JsonlLogger", "draw_curve"]
