"""One job's state machine: observe, decide, act. Knows no Ray."""
