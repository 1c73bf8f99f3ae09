"""Which weights may have made a token: the identities that were in use since its request was taken."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

__all__ = ["Provenance"]


class Provenance:
    """The identities of a server's weights, one after another.

    A change is noted before it can happen and confirmed after it did, so that ``since`` may name weights too many and
    never too few.

    Args:
      first: of the weights that it starts with; "" where no trainer made them.
    """

    def __init__(self, first: str) -> None:
        self._identities, self._confirmed = [first], 0

    def mark(self) -> int:
        """A place for ``since``, as of now."""
        return self._confirmed

    def at(self, mark: int) -> str:
        """The weights that were in use there."""
        return self._identities[mark]

    def since(self, mark: int) -> tuple[str, ...]:
        """All weights that may have been in use from there on, the first ones first.

        >>> weights = Provenance("a")
        >>> mark = weights.mark()
        >>> with weights.changing("b"):
        ...     print(weights.at(weights.mark()), weights.since(mark))
        a ('a', 'b')
        >>> weights.since(mark), weights.since(weights.mark())
        (('a', 'b'), ('b',))
        """
        return tuple(dict.fromkeys(self._identities[mark:]))

    @contextlib.contextmanager
    def changing(self, identity: str) -> Iterator[None]:
        """While the weights are changed to these, one change at a time; an exception says that the old ones stayed."""
        self._identities.append(identity)
        try:
            yield
        except BaseException:
            self._identities.pop()
            raise
        self._confirmed = len(self._identities) - 1
