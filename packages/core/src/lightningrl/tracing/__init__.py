"""What a worker process sees of the agent: redirected model calls, and spans of calls and tools.

agent ─► SDK ─► httpx/requests/aiohttp `send`  ──(redirect)──►  {server}/rollouts/{id}/attempts/{n}/v1/…
          │                   ▲
          └─► adapter ────────┘ call_origin(): agent name, span id           spans ──(OTLP)──► …/v1/traces
"""
