"""Decisions of a job as pure functions: from what was observed to actions and events."""
