"""Training state of one worker: its sources, its update, its export."""
