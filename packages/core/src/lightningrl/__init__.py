"""LightningRL: train the language model inside any agent with reinforcement learning."""
