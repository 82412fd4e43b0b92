"""Steps of the controller, one module for each state."""
