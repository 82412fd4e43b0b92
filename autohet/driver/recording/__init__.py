"""Record of a run's observations and decisions, and the replay that decides them again."""
