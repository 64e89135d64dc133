"""Words of messages that depend on what they are about."""

from __future__ import annotations


def a_type(obj: object) -> str:
    """The name of an object's type with its article: "a list", "an int"."""
    name = type(obj).__name__
    return f"{'an' if name[0] in 'aeiouAEIO' else 'a'} {name}"


def counted(number: int, what: str, several: str = "") -> str:
    """A number of things: "1 layer", "2 layers"; ``several`` is their plural where that is not by an s."""
    return f"{number} {what if number == 1 else several or what + 's'}"
