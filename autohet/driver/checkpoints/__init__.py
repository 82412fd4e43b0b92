"""Checkpoints of a job as its driver sees them: commits, resumption, the losses kept with them."""
