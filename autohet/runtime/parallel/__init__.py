"""Passes and sums of one step: a worker's place, its schedule, its executor, gradient sync."""
