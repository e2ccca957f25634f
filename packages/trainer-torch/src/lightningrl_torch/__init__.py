"""LightningRL's embedded trainer: transformers and torch on one machine. The public names are in `backend`, `engine`, `learner`, `losses`."""
