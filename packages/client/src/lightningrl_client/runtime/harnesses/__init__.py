"""Coding harnesses as agents: a program in a folder of the rollout's own, whose work is checked before it goes."""
