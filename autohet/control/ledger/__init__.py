"""Ledger of a run: committed steps, checkpoints, failures, and the summary that they add up to."""
