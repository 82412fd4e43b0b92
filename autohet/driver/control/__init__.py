"""State machine of one job: observe, decide, act. Knows no Ray."""
