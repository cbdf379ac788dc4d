"""A property that is computed once, without a lock."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


class lazy(Generic[T]):
    """A property that is computed when it is first read, and kept in the instance.

    functools.cached_property holds a lock while it computes on Python 3.10 and 3.11, one for all
    instances of a class: a process that is forked meanwhile could never read it again. Here
    nothing is held: threads that read at the same time all compute, and the first result stays.

    Examples
    --------
    >>> class Circle:
    ...     radius = 2
    ...
    ...     @lazy
    ...     def area(self):
    ...         return 3 * self.radius**2
    >>> circle = Circle()
    >>> circle.area, vars(circle)
    (12, {'area': 12})
    """

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self.compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> "lazy[T]": ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self
        return instance.__dict__.setdefault(self.name, self.compute(instance))
