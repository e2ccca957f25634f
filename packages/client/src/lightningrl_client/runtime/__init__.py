"""The client side: warm worker processes that run the agent, an attempt after the other; here, or by a launcher.

WorkerPool ─► launcher ─► Supervisor ─spawns, kills─► worker ─lease─► run the agent ─► spans, result ─► server
"""
