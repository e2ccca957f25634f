"""LightningRL's embedded trainer: transformers and torch on one machine; see `backend`, `engine`, `learner`,
`losses`."""
