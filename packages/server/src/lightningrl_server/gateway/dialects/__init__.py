"""The APIs that agents speak, each ⇄ our own request and answer."""
