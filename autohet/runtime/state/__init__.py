"""Training state of one worker: where it comes from, its update, its export."""
