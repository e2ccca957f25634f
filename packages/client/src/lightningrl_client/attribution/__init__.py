"""Attribution: the agent's calls in a worker process, and the rollout that each belongs to.

agent ─► SDK ─► httpx/requests/aiohttp `send` ──(redirect)──► {server}/rollouts/{id}/attempts/{n}/v1/…
          │                  ▲            with its key (scope), role (call_origin, role), an id that its retries share
          └─► adapter ───────┘ call_origin(): agent name, span id                                           (scope)
"""
