"""The Lightning Client: runs unchanged agents and attributes their calls."""
