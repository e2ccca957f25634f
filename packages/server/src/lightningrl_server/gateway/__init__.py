"""The gateway: agents speak to it as to any model API; every call becomes a recorded transition."""
