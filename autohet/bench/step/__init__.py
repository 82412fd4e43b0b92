"""A training step against a plain loop of the same model."""
