"""A number with the thing that it counts, as messages say it."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """Such as 1 row or 2 rows; ``noun`` forms its plural by an s."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
