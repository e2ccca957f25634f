"""Clients of the control API."""
