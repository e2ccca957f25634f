"""The Lightning Server: control API, store and gateway in a process of their own."""
