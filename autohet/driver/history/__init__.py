"""History of a run: steps, checkpoints, changes and failures, and the documents made of them."""
