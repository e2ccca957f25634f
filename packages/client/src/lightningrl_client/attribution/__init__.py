"""Whose call it is: what a worker process sees of its agent.

agent ─► SDK ─► httpx/requests/aiohttp `send`  ──(redirect)──►  {server}/rollouts/{id}/attempts/{n}/v1/…
          │                   ▲              with its key (scope), its role (origin, role), an id that its retries share (call_ids)
          └─► adapter ────────┘ call_origin(): agent name, span id
"""
