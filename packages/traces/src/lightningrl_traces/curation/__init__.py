"""Curation: the calls of runs become rows that a model is tuned on, own runs' and imported traces' alike.

runs ─► sources.py ─► calls as chat messages (prompts.py) ─► rules.py: may it be a row, is it a good one?
     ─► near_equality.py: nothing twice, no task on both sides
     ─► rows.py: sft, kto, dpo ─► files.py

Nothing is left out in silence: `report.json` counts each reason.
"""
