"""Text of a library's error, for a message of one sentence."""


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, or its class's name if it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
