"""One training step and its commit, from batches to votes."""
