"""What has files open, and closes them at the end of a `with` block."""

from __future__ import annotations

from types import TracebackType
from typing import TypeVar

C = TypeVar("C", bound="Closing")


class Closing:
    """Base of readers, which say how they are closed."""

    def __enter__(self: C) -> C:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the files; what was read stays."""
        raise NotImplementedError
