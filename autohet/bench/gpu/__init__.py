"""What `scripts/gpu` runs: what this package claims of GPUs, tried on those that are there."""
