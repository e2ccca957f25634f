"""A warm start: rows of traces or of a teacher, a tuned policy made of them, and RL from there, in one run.

traces | teacher ─► rows (curation) ─► tuned policy ─► the run's own start
"""
