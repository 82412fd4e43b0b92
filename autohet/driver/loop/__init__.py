"""Loop around the controller: ticks, events, recordings and searches in the background."""
