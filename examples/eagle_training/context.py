"""What a target continues; importable without torch."""

from typing import NamedTuple


class Context(NamedTuple):
    """Token ids and the domain that they are counted under."""

    ids: list[int]
    domain: str
