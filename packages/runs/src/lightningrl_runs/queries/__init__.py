"""Questions of pages and reports about many rollouts of a run: which, how many of each kind, the run's health.

RunQueries(store).list_rows(RolloutQuery(…)) ─► rollout_index (in memory) ─► rollout_rows, rollout_counts
                 .health(), .position()      ─► health                     the store's own tables, read-only
"""
