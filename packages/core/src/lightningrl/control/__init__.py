"""The control API: what is asked and answered, said once for the server, its clients and OpenAPI."""
