"""The planner's errors.

Both pickle, and both are the user's mistake: the command line turns them into exit code 2.
"""


class ConfigError(ValueError):
    """A document or an argument is wrong. The message names the value, the limit and the remedy."""


class InfeasibleError(ConfigError):
    """No plan can meet the request.

    The message names the tightest limit and by how much it is broken.
    """
