"""Values that the controller reads and returns: observations, actions, states, changes."""
