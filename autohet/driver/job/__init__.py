"""One job from its file to its result: checks, preparation, supervision, the run and its record."""
