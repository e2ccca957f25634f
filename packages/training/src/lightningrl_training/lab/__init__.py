"""The lab: questions about a run after it was trained. Nothing is trained, and the run stays as it is."""
