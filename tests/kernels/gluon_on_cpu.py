"""An emulator of Gluon kernels with warp roles: their own code, on PyTorch's tensors instead of Gluon's, on a CPU.

The roles of a launch run one at a time, each until it waits for something that another has yet to do, or arrives at a
barrier; which one goes on is random, but the same in each run. A deadlock is found as soon as every role waits.

Copies to shared memory end in random order, some only when every role waits. Products on tensor cores, and stores from
shared memory, read their operands when the role waits for them, and other roles may run after each arrival: a stage
that is released or overwritten too early changes the result. Products are exact and their sums are in float32, as on
the tensor cores. Layouts of registers have no meaning. A role is one thread, so races between its warps do not show.
"""

from __future__ import annotations

import contextlib
import random
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from tests.kernels import row_products

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator
    from types import ModuleType


class Array(torch.Tensor):
    """A tensor with the methods of Gluon's, whose augmented assignments bind a new value."""

    def __iadd__(self, other: Any) -> Any:  # type: ignore[misc]
        return self + other

    def __isub__(self, other: Any) -> Any:  # type: ignore[misc]
        return self - other

    def __iand__(self, other: Any) -> Any:  # type: ignore[misc]
        return self & other

    @property
    def type(self) -> Any:
        return SimpleNamespace(layout=None)

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Array:
        if bitcast and dtype is torch.uint32:
            return super().to(torch.int64) & 0xFFFFFFFF
        return self.view(dtype) if bitcast else super().to(dtype)


def array(x: Any) -> Array:
    return torch.as_tensor(x).as_subclass(Array)


class Pointer:
    """Addresses of elements of a tensor."""

    def __init__(self, memory: torch.Tensor, offset: Any = 0) -> None:
        self.memory, self.offset = memory, offset
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.offset + offset)

    def places(self, mask: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the places, 0 where `mask` is false, and the mask."""
        offset = torch.as_tensor(self.offset).long()
        shown = torch.as_tensor(True if mask is None else mask)
        offset, shown = torch.broadcast_tensors(offset, shown)
        offset = offset.where(shown, torch.zeros(()).long())
        assert (offset >= 0).all()
        return torch.Tensor(offset).long(), torch.Tensor(shown).bool()


class Shared:
    """Shared memory, as a tensor."""

    layout = None

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory, self.dtype = memory, memory.dtype

    def index(self, i: Any) -> Shared:
        return type(self)(self.memory[int(i)])

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return type(self)(self.memory.narrow(dim, start, length))

    def permute(self, order: tuple[int, ...]) -> Shared:
        return type(self)(self.memory.permute(order))

    def _reinterpret(self, dtype: Any, shape: list[int], layout: Any) -> Any:
        del dtype, layout
        return type(self)(self.memory.view([int(size) for size in shape]))

    def load(self, layout: Any) -> Array:
        del layout
        return array(self.memory.clone())

    def store(self, value: torch.Tensor) -> None:
        assert value.dtype is self.dtype
        self.memory.copy_(value)


class MBarrier:
    """An mbarrier: a phase completes when all arrivals and all expected bytes have come.

    Args:
        count: arrivals of a phase; 0 until `init` is called.
    """

    def __init__(self, count: int = 0) -> None:
        self.count = self.pending = count
        self.bytes = self.completed = 0

    def init(self, count: int) -> None:
        self.count = self.pending = int(count)

    def invalidate(self) -> None:
        """End the use of the barrier; its memory may be used for something else."""
        assert self.count, "not initialized"
        assert not self.bytes, "bytes that have not come"
        assert self.pending == self.count, "a phase has begun"
        self.count = self.pending = 0

    def expect(self, size: int, pred: Any = True) -> None:
        if pred:
            self.bytes += int(size)
            self.arrive()

    def arrive(self, count: int = 1, pred: Any = True) -> None:
        if pred:
            self.pending -= count
            assert self.pending >= 0, "more arrivals than a phase has"
            self._complete()
            let_others_run()

    def receive(self, size: int) -> None:
        """Count the bytes of a copy."""
        self.bytes -= size
        assert self.bytes >= 0, "more bytes than expected"
        self._complete()

    def wait(self, phase: Any) -> None:
        wait_until(lambda: self.completed & 1 != int(phase))

    def _complete(self) -> None:
        if not self.pending and not self.bytes:
            self.completed, self.pending = self.completed + 1, self.count


class MBarriers:
    """The mbarriers of a ring; `arrivals` is the count of each."""

    def __init__(self, count: int, arrivals: int = 0) -> None:
        self.barriers = [MBarrier(arrivals) for _ in range(count)]

    def index(self, i: Any) -> MBarrier:
        return self.barriers[int(i)]


class NamedBarrier:
    """A barrier of the hardware, at which one role arrives and another waits."""

    def __init__(self) -> None:
        self.arrived = False

    def arrive(self) -> None:
        assert not self.arrived, "two arrivals at once"
        self.arrived = True
        let_others_run()

    def wait(self) -> None:
        wait_until(lambda: self.arrived)
        self.arrived = False


class _Stopped(BaseException):
    """Ends a role after another one failed."""


class _Role(threading.Thread):
    """A thread that runs a role whenever the schedule lets it go on."""

    def __init__(self, function: Callable[[], None], schedule: _Schedule) -> None:
        super().__init__(daemon=True)
        self._function, self._schedule = function, schedule
        self._may_run = threading.Semaphore(0)
        self.is_ready: Callable[[], Any] = lambda: True

    def go_on(self) -> None:
        self._may_run.release()

    def wait_until(self, is_ready: Callable[[], Any]) -> None:
        self.is_ready = is_ready
        self._schedule.choose()
        self._await_turn()

    def let_others_run(self) -> None:
        """Let other roles run, unless this one is choosing the next: a copy that ends then arrives at its barrier."""
        if not self._schedule.is_choosing:
            self.wait_until(lambda: True)

    def start_copy(self, end: Callable[[], None], *, in_order: bool) -> None:
        self._schedule.copies.start(end, self if in_order else object())

    def run(self) -> None:
        _OWN.role = self
        try:
            self._await_turn()
            self._function()
            assert not _OWN.products, "products are not waited for"
            assert not _OWN.stores, "stores are not waited for"
        except _Stopped:
            pass
        except BaseException as error:  # noqa: BLE001 - raised again in the thread of the test
            self._schedule.error = self._schedule.error or error
        self._schedule.roles.remove(self)
        self._schedule.choose()

    def _await_turn(self) -> None:
        self._may_run.acquire()
        if self._schedule.error:
            raise _Stopped


class _Copies:
    """Copies that have not ended; those of a queue end in order."""

    def __init__(self, order: random.Random) -> None:
        self._random = order
        self._queues: dict[Hashable, list[Callable[[], None]]] = {}

    def __len__(self) -> int:
        return len(self._queues)

    def start(self, end: Callable[[], None], queue: Hashable) -> None:
        self._queues.setdefault(queue, []).append(end)

    def end_one(self) -> None:
        queue = self._random.choice(list(self._queues))
        end = self._queues[queue].pop(0)
        if not self._queues[queue]:
            del self._queues[queue]
        end()

    def end_some(self) -> None:
        """End a random number of them."""
        for _ in range(self._random.randint(0, len(self))):
            self.end_one()


class _Schedule:
    """The roles that have not ended; the one that runs chooses the next as it waits or ends."""

    def __init__(self, functions: list[Callable[[], None]], seed: int) -> None:
        self._random = random.Random(seed)
        self.roles = [_Role(it, self) for it in functions]
        self.copies = _Copies(self._random)
        self.error: BaseException | None = None
        self.is_choosing = False
        self._ended = threading.Event()

    def run(self) -> None:
        for role in self.roles:
            role.start()
        self.choose()
        self._ended.wait()
        if self.error:
            raise self.error

    def choose(self) -> None:
        self.is_choosing = True
        try:
            chosen = self._next()
        except BaseException as error:  # noqa: BLE001 - raised again in the thread of the test
            self.error = self.error or error
            chosen = self.roles[0] if self.roles else None
        self.is_choosing = False
        if chosen is None:
            self._ended.set()
        else:
            chosen.go_on()

    def _next(self) -> _Role | None:
        """Return a role that can go on; None if all have ended."""
        if not self.error:
            self.copies.end_some()
        if not self.roles:
            assert not self.copies or self.error, "copies are not waited for"
            return None
        first = self._random.randrange(len(self.roles))
        order = self.roles[first:] + self.roles[:first]
        while True:
            for role in order:
                if self.error or role.is_ready():
                    return role
            assert self.copies, "deadlock"
            self.copies.end_one()


class _Own(threading.local):
    """A thread's role, and its products and stores in flight."""

    role: _Role

    def __init__(self) -> None:
        self.products: list[Callable[[], None]] = []
        self.stores: list[Callable[[], None]] = []


_OWN = _Own()


def run_roles(functions: list[Callable[[], None]], seed: int = 0) -> None:
    """Run the roles of a launch, or of one of its programs, until all have ended.

    Args:
        functions: the roles.
        seed: of the order in which they go on, and copies end.

    Raises:
        AssertionError: with "deadlock" if all roles that are left wait for each other.
        BaseException: the first that a role raised.
    """
    _Schedule(functions, seed).run()


def wait_until(is_ready: Callable[[], Any]) -> None:
    """Let other roles run until a condition holds.

    Args:
        is_ready: computes the condition, without effects.

    Raises:
        AssertionError: if no role is left that could change a condition that does not hold.
    """
    if not is_ready():
        _OWN.role.wait_until(is_ready)


def let_others_run() -> None:
    """Let other roles run, as they could on a GPU at any time."""
    _OWN.role.let_others_run()


def start_copy(end: Callable[[], None], *, in_order: bool = False) -> None:
    """Start a copy, which ends at a random time, at the latest when all roles wait.

    Args:
        end: writes what is copied, and then arrives at a barrier.
        in_order: whether copies that this role starts so end one after the other.
    """
    _OWN.role.start_copy(end, in_order=in_order)


def argument(x: Any) -> Any:
    """Return what stands for an argument of a launch in the kernel: a tensor, a descriptor of one, or a number."""
    if isinstance(x, torch.Tensor):
        return Pointer(x)
    if hasattr(x, "block_shape"):
        dtype = SimpleNamespace(primitive_bitwidth=8 * x.base.dtype.itemsize, of_torch=x.base.dtype)
        return SimpleNamespace(
            memory=x.base.as_strided(x.shape, x.strides),
            block_type=SimpleNamespace(shape=x.block_shape),
            dtype=dtype,
            layout=None,
        )
    return array(x) if isinstance(x, int) else x


def box_of(desc: Any, where: list[Any]) -> torch.Tensor:
    """Return the part that a descriptor's tensor has of its box at the corner `where`."""
    corner = [int(it) for it in where]
    ends = map(sum, zip(corner, desc.block_type.shape, strict=True))
    found: torch.Tensor = desc.memory[tuple(map(slice, corner, ends))]
    return found


def undefined(dtype: torch.dtype) -> float:
    """Return what stands for undefined numbers: NaN, or the largest number of a byte."""
    return torch.nan if dtype.is_floating_point else 255


def copy_box(box: torch.Tensor, target: Shared, full: MBarrier) -> None:
    """Start the copy of a box of a tensor to shared memory by TMA; what lies outside of the tensor is 0.

    Args:
        box: the part of the box that the tensor has.
        target: has the shape of the whole box; its content is undefined until the copy ends.
        full: receives the bytes.
    """

    def end() -> None:
        target.memory.zero_()
        target.memory[tuple(map(slice, box.shape))] = box
        full.receive(target.memory.numel() * target.memory.element_size())

    target.memory.fill_(undefined(target.memory.dtype))
    start_copy(end)


def store_box(desc: Any, where: list[Any], source: Shared) -> None:
    """Start the copy of shared memory to a box of a tensor by TMA; what lies outside of the tensor is dropped.

    Args:
        desc: of the tensor, see `argument`.
        where: the corner of the box.
        source: has the shape of the box.
    """
    assert list(map(int, source.memory.shape)) == list(map(int, desc.block_type.shape))
    box = box_of(desc, where)
    _OWN.stores.append(lambda: box.copy_(source.memory[tuple(map(slice, box.shape))]))


def wait_stores(left: int) -> None:
    """Wait until at most `left` stores of this role are in flight."""
    _end_all_but(_OWN.stores, left)


def issue_product(a: Shared | Array, b: Shared, acc: Array, use_acc: bool = True) -> Array:
    """Issue a WGMMA; returns its result [M, N] float32, which is NaN until it is waited for.

    Args:
        a: [M, K]; in registers, it must not change until the product is waited for.
        b: [K, N].
        acc: [M, N], which the product is added to if `use_acc`.
    """
    dtype = a.dtype
    assert dtype is b.dtype
    left = a.memory if isinstance(a, Shared) else torch.Tensor(a)
    result = torch.full((left.shape[0], b.memory.shape[1]), torch.nan)

    def end() -> None:
        result.copy_(row_products.multiply(left.float(), b.memory.float()))
        if use_acc:
            result.add_(torch.Tensor(acc))

    _OWN.products.append(end)
    return array(result)


def wait_products(left: int, deps: tuple[Any, ...]) -> Any:
    """Wait until at most `left` products of this role are in flight; returns `deps`, or the only one."""
    _end_all_but(_OWN.products, left)
    return deps if len(deps) > 1 else deps[0]


def products_in_flight() -> int:
    """Return how many products of this role may still read their operands."""
    return len(_OWN.products)


def _end_all_but(pending: list[Callable[[], Any]], left: int) -> None:
    while len(pending) > left:
        pending.pop(0)()


def names_of_hopper(device: Any) -> dict[str, Any]:
    """Return what takes the place of Gluon's names for Hopper: barriers, copies and products.

    Args:
        device: has `copy`, which starts a copy to shared memory, and `warpgroup_mma`.
    """
    return {
        "mbarrier": SimpleNamespace(
            MBarrierLayout=lambda: None, init=MBarrier.init, expect=MBarrier.expect, wait=MBarrier.wait,
            arrive=MBarrier.arrive, invalidate=MBarrier.invalidate,
        ),
        "tma": SimpleNamespace(
            async_copy_global_to_shared=device.copy,
            async_copy_shared_to_global=store_box,
            store_wait=wait_stores,
        ),
        "fence_async_shared": lambda: None,
        "warpgroup_mma": device.warpgroup_mma,
        "warpgroup_mma_init": lambda x: x,
        "warpgroup_mma_wait": wait_products,
        "gdc_wait": lambda: None,
        "gdc_launch_dependents": lambda: None,
    }  # fmt: skip


def constants_of(aggregate: Any, modules: tuple[ModuleType, ...]) -> Callable[..., SimpleNamespace]:
    """Return what takes the place of an aggregate of constants, which the compiler makes with Gluon's own names.

    Args:
        aggregate: the class.
        modules: whose names are those of Gluon now, and replaced when the aggregate is made.
    """
    names = [dict(vars(module)) for module in modules]

    def make(*given: Any, **named: Any) -> SimpleNamespace:
        with contextlib.ExitStack() as stack:
            for module, original in zip(modules, names, strict=True):
                stack.enter_context(mock.patch.dict(vars(module), original))
            fields = vars(aggregate(*given, **named))
        # Triton 3.9 has unwrapped them already.
        return SimpleNamespace(**{field: getattr(it, "value", it) for field, it in fields.items()})

    return make


@contextlib.contextmanager
def in_place_of_gluon(
    modules: tuple[ModuleType, ...], device: object, replaced: dict[str, Any]
) -> Iterator[None]:
    """Replace Gluon by `device`, and other names that modules import; their functions call each other as Python's."""
    with contextlib.ExitStack() as stack:
        for module in modules:
            names = vars(module)
            functions = {name: it.fn for name, it in names.items() if hasattr(it, "fn")}
            plain = {
                name: it.value for name, it in names.items() if type(it).__name__ == "constexpr"
            }
            own = {name: it for name, it in replaced.items() if name in names}
            stack.enter_context(
                mock.patch.multiple(module, **({"gl": device} | functions | plain | own))
            )
        yield
