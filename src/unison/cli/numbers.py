"""Parsers of numeric options."""

from __future__ import annotations

import argparse
import math


def positive(text: str) -> int:
    """Returns a count of at least 1, for `add_argument(type=...)`.

    Raises:
        ArgumentTypeError: The text is not such a number.

    Examples:
        >>> positive("3")
        3
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, received {text!r}")
    return int(text)


def seconds(text: str) -> float:
    """Returns a timeout, for `add_argument(type=...)`.

    Raises:
        ArgumentTypeError: The text is not a number, or the number is not positive or is infinite.

    Examples:
        >>> seconds("1.5")
        1.5
    """
    value = _number(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected seconds, more than 0, received {text!r}")
    return value


def percentage(text: str) -> float:
    """Returns a percentage, for `add_argument(type=...)`.

    Raises:
        ArgumentTypeError: The text is not a number that is more than 0 and at most 100.

    Examples:
        >>> percentage("0.5")
        0.5
    """
    value = _number(text)
    if not 0 < value <= 100:
        raise argparse.ArgumentTypeError(f"expected a percentage, received {text!r}")
    return value


def _number(text: str) -> float:
    """Returns the number that a text states; NaN if it states none."""
    try:
        return float(text)
    except ValueError:
        return math.nan
