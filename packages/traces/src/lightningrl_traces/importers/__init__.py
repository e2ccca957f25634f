"""Importers of traces, one format each."""
