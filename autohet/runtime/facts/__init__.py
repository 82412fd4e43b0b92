"""Facts of a model and a plan: the model spec, the state layout, and where facts are stored."""
