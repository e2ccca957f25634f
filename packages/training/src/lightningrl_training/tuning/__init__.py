"""Tuning a policy on rows that are there, without a rollout: SFT, DPO and KTO."""
