"""The training loop and what it stands on: tasks, run folder, scoring, progress, session."""
