"""The name that was probably meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(word: str, names: Iterable[str]) -> str | None:
    """Return the name closest to `word`, or None where nothing is close.

    Letter case does not count; an abbreviation by initials does, also of a misspelt word.

    Example:
        >>> nearest("resnet", ["ResNet", "VGG"])
        'ResNet'
        >>> nearest("lerning_rate", ["params", "lr", "momentum"])
        'lr'
        >>> nearest("zebra", ["ResNet", "VGG"]) is None
        True
    """
    by_folded = {name.casefold(): name for name in names}
    folded = word.casefold()
    if close := get_close_matches(folded, by_folded, n=1, cutoff=0.6):
        return by_folded[close[0]]
    initials = "".join(part[0] for part in folded.split("_") if part)
    if len(initials) > 1 and initials in by_folded:
        return by_folded[initials]
    return None


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """Return ``": did you mean `name`?"``, or the sorted names where none is close."""
    known = sorted(set(names))
    if (name := nearest(word, known)) is not None:
        return f": did you mean `{name}`?"
    if not known:
        return ": there are none at all."
    return f". Known: {', '.join(f'`{name}`' for name in known)}."
