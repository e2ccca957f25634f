"""Sweeps: a recipe's runs over seeds and settings, and what they show.

plan.json (the points, written first) ─► a `lightningrl train` process for each ─► sweep.json, curves.png
"""
