"""Looking at a run without touching it: its store and its tokenizers, read; nothing is written, no lock is taken.

    open_run(folder) ─► StoredRun.trace(id) ─► Trace: what was said in which tokens, what each call earned

The command line prints traces; a notebook and a viewer show the same.
"""
