"""LightningRL's verl backend: verl's own trainer and vLLM replicas on Ray, fed with LightningRL's samples."""
