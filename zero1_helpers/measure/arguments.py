"""Arguments of a command line: numbers are checked where they are read, and wrong use is one line."""

import argparse
import math
from collections.abc import Callable


class WrongUse(Exception):
    """Of the command line: (command, what is wrong)."""


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise WrongUse(self.prog, f"{message}; see {self.prog} --help")


def whole(least: int, most: int) -> Callable:
    """The type of an argument: a whole number in this range."""

    def parsed(text: str) -> int:
        try:
            number = int(text) if len(text) < 30 else least - 1
        except ValueError:
            number = least - 1
        if not least <= number <= most:
            raise argparse.ArgumentTypeError(
                f"a whole number from {least:,} to {most:,}, not {text[:30]!r}"
            )
        return number

    return parsed


def amount(least: float, most: float) -> Callable:
    """The type of an argument: a finite number in this range."""

    def parsed(text: str) -> float:
        try:
            number = float(text) if len(text) < 30 else math.nan
        except ValueError:
            number = math.nan
        if not least <= number <= most:
            raise argparse.ArgumentTypeError(
                f"a number from {least:g} to {most:g}, not {text[:30]!r}"
            )
        return number

    return parsed
