"""Ranges of whole numbers: pairs of the first and the last."""


def merge(ranges):
    """The same numbers in as few ranges as possible, in order."""
    merged = []
    for first, last in ranges:
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], last)
        else:
            merged.append((first, last))
    return merged


def count(ranges):
    """How many numbers there are."""
    return sum(last - first + 1 for first, last in merge(ranges))
