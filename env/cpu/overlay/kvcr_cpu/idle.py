"""How an idle thread waits: woken by an event, or after a delay that grows while nothing happens."""

import os
import queue
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

# Work wakes the loops at once (a request, a submission, a control message, a completion), so a ceiling only bounds what nobody
# announces: in KVCR's progress loop late notifications, in the scheduler loop expiring pins, whose deadlines are seconds away.
FLOOR_SECONDS = 0.001
QUIET_ROUNDS = 8
PROGRESS_CEILING_SECONDS = 0.05
SCHEDULER_CEILING_SECONDS = 0.5
# Where a loop cannot be woken by an event, the ceiling is a latency: keep it small.
BLIND_CEILING_SECONDS = 0.005
# NIXL's UCX progress thread waits for an event of UCX, at most this long, rounded up to whole milliseconds (upstream: not at all, one
# core an agent).
NIXL_PROGRESS_DELAY_MICROSECONDS = 1000
# A reader of vLLM's shared-memory queue looks at the buffer this often for this long after each message, then waits for the writer's
# notification, and looks again anyway after the last of the three. The writer's socket drops a notification that follows another
# within about a millisecond (its high-water mark is one and ZeroMQ notices reads at most that often), so the first span must be
# several times that; measured without it: 100 ms for a round trip that takes 0.2 ms.
READER_LOOK_SECONDS = 0.0001
READER_LOOKING_SECONDS = 0.005
READER_RECHECK_MILLISECONDS = 100


class Backoff:
    """Delays of a polling loop: ``floor`` for the first ``quiet_rounds`` rounds without work, then doubling up to ``ceiling``."""

    __slots__ = ("_ceiling", "_delay", "_floor", "_quiet_rounds", "_rounds")

    def __init__(self, ceiling: float, floor: float = FLOOR_SECONDS, quiet_rounds: int = QUIET_ROUNDS) -> None:
        if not 0 < floor <= ceiling or quiet_rounds < 0:
            raise ValueError("a back-off needs 0 < floor <= ceiling and quiet_rounds >= 0")
        self._floor = floor
        self._ceiling = ceiling
        self._quiet_rounds = quiet_rounds
        self.reset()

    def reset(self) -> None:
        """There was work: start again from the floor."""
        self._rounds = 0
        self._delay = self._floor

    def next(self) -> float:
        """The delay of this idle round."""
        self._rounds += 1
        if self._rounds > self._quiet_rounds:
            self._delay = min(self._delay * 2, self._ceiling)
        return self._delay


class Bell:
    """Connects the threads of a process that finish something to the loops that want to look at it at once."""

    def __init__(self) -> None:
        self._listeners: tuple[Callable[[], None], ...] = ()

    def listen(self, listener: "Callable[[], None]") -> None:
        self._listeners = (*self._listeners, listener)

    def ring(self) -> None:
        for listener in self._listeners:
            listener()


class RealWork:
    """While ``asked``, a tier that always claims pending work must say whether it has any.

    Only the scheduler's own thread sets it and only functions called by that thread read it.
    """

    def __init__(self) -> None:
        self.asked = False

    def __enter__(self) -> None:
        self.asked = True

    def __exit__(self, *_: object) -> None:
        self.asked = False


COMPLETIONS = Bell()
REAL_WORK = RealWork()


class AnnouncingQueue(queue.SimpleQueue):  # type: ignore[type-arg]
    """A ``SimpleQueue`` that calls ``announce`` after every item."""

    announce: "Callable[[], None]"

    def put(self, item: object, block: bool = True, timeout: float | None = None) -> None:
        super().put(item, block, timeout)
        self.announce()


class ProgressWait:
    """What KVCR's progress thread waits for while it has no operation: a submission, a control message, or the back-off.

    Belongs to one ``_KVCRProgress``; ``wait`` runs on its thread, which also owns the control socket. ``announce`` may be called
    from anywhere.
    """

    def __init__(self, control: object | None) -> None:
        self._control = control
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closed = False
        self._backoff = Backoff(PROGRESS_CEILING_SECONDS)
        self._blind = Backoff(BLIND_CEILING_SECONDS)

    def announce(self) -> None:
        if not self._closed:
            os.eventfd_write(self._event, 1)

    def reset(self) -> None:
        self._backoff.reset()
        self._blind.reset()

    def wait(self) -> None:
        socket = getattr(self._control, "_socket", None)
        if self._control is not None and socket is None:
            # The channel is not the ZeroMQ one: nothing to select on, so look often.
            time.sleep(self._blind.next())
            return
        import zmq

        poller = zmq.Poller()
        poller.register(self._event, zmq.POLLIN)
        if socket is not None:
            poller.register(socket, zmq.POLLIN)
        ready = dict(poller.poll(max(1, round(self._backoff.next() * 1000))))
        if ready:
            self.reset()
        if self._event in ready:
            os.eventfd_read(self._event)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            os.close(self._event)

    def __del__(self) -> None:
        self.close()
