"""The patches, each with what upstream does, why that hurts here, what changes, and what does not.

Every patch first checks that the names and signatures it relies on are the ones it was written for; ``hooks.Patch`` turns a mismatch
into an ``OverlayError`` naming the installed release, which stops the import and with it the engine.
"""

import queue
import time

from . import idle
from .hooks import ShapeError, expect

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any


def zmq_address_alias(module: "ModuleType") -> bool:
    """Dynamo 1.6.1 imports ``get_engine_zmq_addresses``; vLLM 0.32 renamed it to ``get_engine_zmq_bind_addresses``.

    Why: ``dynamo.vllm`` dies at import although only its embedding path, which the tests do not use, calls it.
    Changes: the old name exists again and means the renamed function. Does not change: anything that knows the new name.
    """
    if hasattr(module, "get_engine_zmq_addresses"):
        return False
    module.get_engine_zmq_addresses = expect(module, "get_engine_zmq_bind_addresses")
    return True


def nixl_progress_delay(module: "ModuleType") -> None:
    """``nixl_agent.__init__`` hard-codes ``pthrDelay = 0``: the agent's progress thread never sleeps, one core an agent.

    Changes: a configuration that reaches the native agent with delay 0 gets ``NIXL_PROGRESS_DELAY_MICROSECONDS``; transfers complete at
    most that much later. Does not change: a delay somebody chose, any other setting, what is transferred or reported.
    """
    bindings = expect(module, "nixlBind")
    native: Any = expect(module, "nixlBind.nixlAgent")
    config_type = expect(module, "nixlBind.nixlAgentConfig")
    if not hasattr(config_type, "pthrDelay"):
        raise ShapeError(f"{module.__name__}.nixlBind.nixlAgentConfig.pthrDelay is missing")
    expect(module, "nixl_agent.__init__", ("self", "agent_name", "nixl_conf", "instantiate_all"))

    class DelayedBindings:
        """The bindings module as this Python API sees it, with the agent's constructor replaced."""

        def __getattr__(self, name: str) -> object:
            return getattr(bindings, name)

        @staticmethod
        def nixlAgent(name: str, config: "Any") -> object:  # noqa: N802 (upstream's name)
            if config.pthrDelay == 0:
                config.pthrDelay = idle.NIXL_PROGRESS_DELAY_MICROSECONDS
            return native(name, config)

    module.nixlBind = DelayedBindings()


def kvcr_progress_wait(module: "ModuleType") -> None:
    """KVCR's progress thread sleeps 1 ms between polls for ever: a thousand wake-ups a second an agent.

    Changes: while no operation and no transfer is outstanding it waits for a submission or a control message instead, and looks anyway
    after a back-off of 1 to 50 ms; what it publishes wakes the scheduler loop (``engine_idle_wait``). With anything outstanding it
    polls as upstream does. Does not change: what a poll does, its order, its deadlines (KVCR's stall detection allows
    ``operation_timeout_ms``, a hundred times the ceiling), telemetry.
    """
    progress: Any = expect(module, "_KVCRProgress")
    create = expect(module, "_KVCRProgress.__init__")
    iterate = expect(module, "_KVCRProgress._run_one_iteration", ("self",))
    publish = expect(module, "_KVCRProgress._publish_completed", ("self", "limit"))
    for name in ("_submissions", "_in_flight_ops", "_active_transfers", "_poll"):
        if name not in create.__code__.co_names:
            raise ShapeError(f"{module.__name__}._KVCRProgress.__init__ does not set {name}")
    if "_run_one_iteration" not in expect(module, "_KVCRProgress._run", ("self",)).__code__.co_names:
        raise ShapeError(f"{module.__name__}._KVCRProgress._run does not call _run_one_iteration")

    def __init__(self: "Any", *args: "Any", **kwargs: "Any") -> None:
        create(self, *args, **kwargs)
        backend = getattr(self._poll, "__self__", None)
        self._overlay_wait = idle.ProgressWait(getattr(backend, "_control", None))
        submissions = idle.AnnouncingQueue()
        submissions.announce = self._overlay_wait.announce
        self._submissions = submissions

    def _run_one_iteration(self: "Any") -> bool:
        worked = iterate(self)
        if worked or self._in_flight_ops or self._active_transfers:
            self._overlay_wait.reset()
            return worked
        self._overlay_wait.wait()
        return True  # upstream sleeps after False only; the wait is already behind us

    def _publish_completed(self: "Any", limit: int) -> int:
        count = publish(self, limit)
        if count:
            idle.COMPLETIONS.ring()
        return count

    progress.__init__ = __init__
    progress._run_one_iteration = _run_one_iteration
    progress._publish_completed = _publish_completed


def kvcr_real_work(module: "ModuleType") -> None:
    """The KVCR tier's ``has_pending_work`` is always True, so that the scheduler keeps polling for peers.

    Why: nothing above it can tell a loop that only polls from a loop that has jobs. Changes: asked under ``REAL_WORK`` it names jobs
    and pins only. Does not change: the answer to anybody else.
    """
    tier: Any = expect(module, "KVCRSecondaryTierManager")
    always = expect(module, "KVCRSecondaryTierManager.has_pending_work", ("self",))
    expect(module, "_FrameworkPinAdapter.has_active_pins", ("self",))
    create = expect(module, "KVCRSecondaryTierManager.__init__")
    create_pins = expect(module, "_FrameworkPinAdapter.__init__", ("self", "tier"))
    for function, names in (
        (create, ("_jobs_by_op", "_finished_jobs", "_framework_pin_adapter")),
        (create_pins, ("_pending_pins", "_completed_pins", "_pin_job_results")),
    ):
        for name in names:
            if name not in function.__code__.co_names:
                raise ShapeError(f"{module.__name__}.{function.__qualname__} does not set {name}")

    def has_pending_work(self: "Any") -> bool:
        if not idle.REAL_WORK.asked:
            return always(self)
        pins = self._framework_pin_adapter
        return bool(
            self._jobs_by_op
            or self._finished_jobs
            or pins._pending_pins
            or pins._completed_pins
            or pins._pin_job_results
            or pins.has_active_pins()
        )

    tier.has_pending_work = has_pending_work


def engine_idle_wait(module: "ModuleType") -> None:
    """With the KVCR tier the engine core never blocks on its input queue: it steps, and has the worker step, without a pause.

    Changes: before such a step with nothing but polling to do it waits on its input queue for 1 to 500 ms (backing off); a request, an
    abort, a shutdown or a completion of KVCR's progress thread ends the wait at once. Does not change: which steps are made with work
    outstanding, what a step does, the order of requests.
    """
    core: Any = expect(module, "EngineCoreProc")
    process = expect(module, "EngineCoreProc._process_input_queue", ("self",))
    expect(module, "EngineCoreProc._handle_client_request", ("self", "request_type", "request"))
    expect(module, "EngineCoreProc.has_work", ("self",))
    expect(module, "EngineCoreProc.is_running", ("self",))
    wakeup = (expect(module, "EngineCoreRequestType.WAKEUP"), None)
    for name in ("input_queue", "process_input_queue_block"):
        if name not in process.__code__.co_names:
            raise ShapeError(f"{module.__name__}.EngineCoreProc._process_input_queue does not use {name}")

    def only_polls(self: "Any") -> bool:
        """Upstream would step now, though no request, job or pin is outstanding."""
        if not (self.process_input_queue_block and self.is_running() and self.has_work()):
            return False
        with idle.REAL_WORK:
            return not self.has_work()

    def _process_input_queue(self: "Any") -> None:
        backoff = getattr(self, "_overlay_backoff", None)
        if backoff is None:
            backoff = self._overlay_backoff = idle.Backoff(idle.SCHEDULER_CEILING_SECONDS)
            idle.COMPLETIONS.listen(lambda: self.input_queue.put_nowait(wakeup))
        if only_polls(self):
            try:
                request = self.input_queue.get(timeout=backoff.next())
            except queue.Empty:
                pass
            else:
                backoff.reset()
                self._handle_client_request(*request)
        else:
            backoff.reset()
        process(self)

    core._process_input_queue = _process_input_queue


def shm_reader_wait(module: "ModuleType") -> None:
    """A reader of vLLM's shared-memory queue spins in ``sched_yield`` for one second after each message before it sleeps.

    Why: the KVCR tier makes the engine step all the time, so worker and engine core spin for ever, one core each.
    Changes: the reader sleeps 0.1 ms instead of yielding, for 5 ms instead of one second, then waits for the writer's notification as
    upstream does, and looks again every 100 ms in case that was lost. Does not change: messages, their order, time-outs (the caller
    checks them after every wait), the writer's notifications.
    """
    condition: Any = expect(module, "SpinCondition")
    create = expect(module, "SpinCondition.__init__", ("self", "is_reader", "context", "notify_address", "busy_loop_s"))
    wait = expect(module, "SpinCondition.wait", ("self", "timeout_ms"))
    expect(module, "sched_yield", ())
    for name in ("busy_loop_s", "last_read", "poller", "sched_yield"):
        if name not in wait.__code__.co_names:
            raise ShapeError(f"{module.__name__}.SpinCondition.wait does not use {name}")

    def __init__(self: "Any", *args: "Any", **kwargs: "Any") -> None:
        create(self, *args, **kwargs)
        if self.is_reader:
            self.busy_loop_s = idle.READER_LOOKING_SECONDS

    def bounded_wait(self: "Any", timeout_ms: "int | None" = None) -> None:
        limit = idle.READER_RECHECK_MILLISECONDS
        wait(self, limit if timeout_ms is None else min(timeout_ms, limit))

    condition.__init__ = __init__
    condition.wait = bounded_wait
    module.sched_yield = lambda: time.sleep(idle.READER_LOOK_SECONDS)
