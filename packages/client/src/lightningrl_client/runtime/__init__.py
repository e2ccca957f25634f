"""The client side: warm worker processes that run the agent, one attempt after the other; here, or where a launcher
puts them.

WorkerPool ─► launcher ─► Supervisor ─spawns, kills─► worker ─lease─► run the agent ─► spans, result ─► server
"""
