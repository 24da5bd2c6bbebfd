"""Numbers, integers and addresses in a kernel that is run without floating-point numbers."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any, Final

import numpy as np

from tests.kernels.step.schedule.events import Access, ScheduleError

NO_USES: Final[frozenset[int]] = frozenset()
_TYPE: Final = SimpleNamespace(layout=None)


def _binary(self: Value, other: Any) -> Value:
    uses = self.uses
    if isinstance(other, Value) and not other.uses <= uses:
        return Value(uses | other.uses)
    return self if self.__class__ is Value else Value(uses)


class Value:
    """Stands for floating-point numbers; `uses` are those of the ring from which they were computed."""

    __slots__ = ("dtype", "uses")
    __array_ufunc__ = None
    type = _TYPE

    def __init__(self, uses: frozenset[int] = NO_USES, dtype: Any = None) -> None:
        self.uses, self.dtype = uses, dtype

    def to(self, dtype: Any, bitcast: bool = False) -> Value:
        del bitcast
        return Value(self.uses, dtype)

    def __getitem__(self, _index: Any) -> Value:
        return self

    __hash__ = None
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = (
        _binary
    )
    __neg__ = __invert__ = lambda self: self
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __lshift__ = __rshift__ = _binary
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _binary


class Loaded(Value):
    """Published numbers as loaded; they may not be used before they have been received."""

    __slots__ = ("access", "mask")

    def __init__(self, access: Access, mask: Any, dtype: Any) -> None:
        self.access, self.mask, self.dtype = access, mask, dtype

    @property
    def uses(self) -> frozenset[int]:
        raise ScheduleError(
            f"{self.access.buffer} is used in layer {self.access.layer} before it has been received"
        )

    def to(self, dtype: Any, bitcast: bool = False) -> Value:
        del dtype
        return self if bitcast else Value(self.uses)


class Int(int):
    """A number with the method of Gluon's; operations but the division return Python's."""

    def __floordiv__(self, other: Any) -> Any:
        found = super().__floordiv__(other)
        return found if found is NotImplemented else Int(found)

    def to(self, dtype: Any, bitcast: bool = False) -> Int:
        del dtype, bitcast
        return self


class Layers(int):
    """The number of layers, over which a loop counts the current layer."""

    @property
    def value(self) -> int:
        return int(self)


class Index(np.ndarray):
    """Integers or booleans with the methods of Gluon's tensors, whose augmented assignments bind a new value."""

    type = _TYPE

    def to(self, dtype: Any, bitcast: bool = False) -> Index:
        del dtype, bitcast
        return self

    def __iadd__(self, other: Any) -> Any:
        return self + other

    def __iand__(self, other: Any) -> Any:
        return self & other


@functools.cache
def numbers(start: int, stop: int) -> Index:
    found = np.arange(start, stop).view(Index)
    found.setflags(write=False)
    return found


class Memory:
    """A buffer: its name, what it is used for, and its integers, if it has any that the kernel reads."""

    def __init__(
        self, name: str, dtype: Any, size: int, layer: int = 0, integers: np.ndarray | None = None
    ) -> None:
        self.name, self.size, self.layer, self.integers = name, size, layer, integers
        self.dtype = SimpleNamespace(element_ty=dtype)


class Pointer:
    """Addresses of elements of a buffer: a number plus the sum of arrays, which is computed when it is needed."""

    __slots__ = ("memory", "offset", "terms")

    def __init__(self, memory: Memory, offset: int = 0, terms: tuple[np.ndarray, ...] = ()) -> None:
        self.memory, self.offset, self.terms = memory, offset, terms

    @property
    def dtype(self) -> Any:
        return self.memory.dtype

    def __add__(self, other: Any) -> Pointer:
        if isinstance(other, np.ndarray):
            return Pointer(self.memory, self.offset, (*self.terms, other))
        return Pointer(self.memory, self.offset + other, self.terms)

    def to(self, _dtype: Any) -> Pointer:
        return self

    def places(self, mask: Any = None) -> np.ndarray:
        """Return the places where `mask` holds, [n] int64."""
        terms = self.terms
        if not terms:
            found = np.array([self.offset])
        else:
            found = terms[0] + self.offset
            for term in terms[1:]:
                found = found + term
        if mask is not None and mask is not True:
            mask = np.asarray(mask, bool)
            if mask.shape != found.shape:
                shape = np.broadcast_shapes(found.shape, mask.shape)
                found, mask = np.broadcast_to(found, shape), np.broadcast_to(mask, shape)
            found = found[mask]
        return found.view(np.ndarray).ravel()


def any_of(*given: Any, **_: Any) -> Value:
    """Return a value that was computed from those among the arguments."""
    uses = NO_USES
    for it in given:
        if isinstance(it, Value) and not it.uses <= uses:
            uses = uses | it.uses
    return Value(uses)
