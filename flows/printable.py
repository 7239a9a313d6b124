"""Text of others, made fit for a terminal."""


def printable(text: object) -> str:
    """Text from a stored file or a user's code, without control characters that would reach the terminal."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in str(text))
