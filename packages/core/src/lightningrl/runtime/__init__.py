"""The client side: warm worker processes that run the agent, one attempt after the other.

WorkerPool ─spawns, watches, kills─► worker ─lease─► run the agent ─► spans, result ─► server
"""
