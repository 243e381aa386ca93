"""Each patch on a stand-in of its upstream module: what it changes, what it leaves alone, which shapes it refuses."""

import queue
import time
import unittest
from types import SimpleNamespace
from unittest import mock

from support import module_from, needs

from kvcr_cpu import idle, patches
from kvcr_cpu.hooks import ShapeError


class ZmqAddressAlias(unittest.TestCase):
    def test_adds_the_old_name(self):
        module = module_from("def get_engine_zmq_bind_addresses(config, count): return (config, count)")
        self.assertTrue(patches.zmq_address_alias(module))
        self.assertIs(module.get_engine_zmq_addresses, module.get_engine_zmq_bind_addresses)

    def test_not_needed_where_the_name_exists(self):
        module = module_from("def get_engine_zmq_addresses(): return 'own'")
        self.assertIs(patches.zmq_address_alias(module), False)
        self.assertEqual(module.get_engine_zmq_addresses(), "own")

    def test_refuses_a_module_without_either(self):
        with self.assertRaises(ShapeError):
            patches.zmq_address_alias(module_from(""))


NIXL = """
class nixlBind:
    class nixlAgentConfig:
        pthrDelay = None
        useProgThread = None
    made = []
    @staticmethod
    def nixlAgent(name, config):
        nixlBind.made.append((name, config.pthrDelay))
        return name
    OTHER = 7
class nixl_agent:
    def __init__(self, agent_name, nixl_conf=None, instantiate_all=False, delay=0):
        config = nixlBind.nixlAgentConfig()
        config.pthrDelay = DELAY
        self.agent = nixlBind.nixlAgent(agent_name, config)
DELAY = 0
""".replace(", delay=0", "")


class NixlProgressDelay(unittest.TestCase):
    def test_a_delay_of_zero_is_raised(self):
        module = module_from(NIXL)
        native = module.nixlBind
        patches.nixl_progress_delay(module)
        self.assertEqual(module.nixl_agent("a").agent, "a")
        self.assertEqual(native.made, [("a", idle.NIXL_PROGRESS_DELAY_MICROSECONDS)])

    def test_a_chosen_delay_is_kept_and_other_names_are_the_bindings_own(self):
        module = module_from(NIXL)
        native = module.nixlBind
        patches.nixl_progress_delay(module)
        module.DELAY = 25
        module.nixl_agent("a")
        self.assertEqual((native.made, module.nixlBind.OTHER), ([("a", 25)], 7))
        self.assertIs(module.nixlBind.nixlAgentConfig, native.nixlAgentConfig)

    def test_the_shared_bindings_are_not_changed(self):
        module = module_from(NIXL)
        native, constructor = module.nixlBind, module.nixlBind.nixlAgent
        patches.nixl_progress_delay(module)
        self.assertIs(native.nixlAgent, constructor)

    def test_refuses_other_shapes(self):
        for old, new in (("pthrDelay = None", "delay = None"), ("class nixl_agent:", "class agent:"), ("nixl_conf=None", "conf=None"),
                         ("def nixlAgent(", "def Agent(")):
            with self.subTest(new), self.assertRaises(ShapeError):
                patches.nixl_progress_delay(module_from(NIXL.replace(old, new)))


PROGRESS = """
import queue
_STOP = object()
class _KVCRProgress:
    def __init__(self, poll):
        self._poll = poll
        self._submissions = queue.SimpleQueue()
        self._in_flight_ops = {}
        self._active_transfers = {}
        self._backlog = []
        self.published = []
        self.work = False
    def submit(self, item):
        self._submissions.put(item)
    def _run(self):
        while self._run_one_iteration():
            pass
    def _run_one_iteration(self):
        got = []
        while not self._submissions.empty():
            got.append(self._submissions.get())
        self._backlog.extend(got)
        self._publish_completed(9)
        return bool(got) or self.work
    def _publish_completed(self, limit):
        count = len(self._backlog[:limit])
        self.published.extend(self._backlog[:limit])
        del self._backlog[:limit]
        return count
"""


@needs("zmq")
class KvcrProgressWait(unittest.TestCase):
    def setUp(self):
        patcher = mock.patch.object(idle, "COMPLETIONS", idle.Bell())
        patcher.start()
        self.addCleanup(patcher.stop)
        self.rung: list[bool] = []
        idle.COMPLETIONS.listen(lambda: self.rung.append(True))
        self.module = module_from(PROGRESS)
        patches.kvcr_progress_wait(self.module)
        self.progress = self.module._KVCRProgress(lambda: None)
        self.waits = mock.Mock(wraps=None)
        self.progress._overlay_wait.wait = self.waits.wait

    def test_an_idle_round_waits_here_and_tells_upstream_not_to_sleep(self):
        self.assertTrue(self.progress._run_one_iteration())
        self.waits.wait.assert_called_once_with()
        self.assertEqual(self.rung, [])

    def test_work_is_not_waited_for_and_what_it_publishes_rings(self):
        self.progress.submit("x")
        self.assertTrue(self.progress._run_one_iteration())
        self.waits.wait.assert_not_called()
        self.assertEqual((self.progress.published, self.rung), (["x"], [True]))

    def test_outstanding_operations_and_transfers_keep_upstreams_pace(self):
        for outstanding in (self.progress._in_flight_ops, self.progress._active_transfers):
            outstanding[1] = object()
            self.assertFalse(self.progress._run_one_iteration())
            self.waits.wait.assert_not_called()
            outstanding.clear()

    def test_a_submission_ends_a_wait(self):
        progress = self.module._KVCRProgress(lambda: None)
        progress._overlay_wait._backoff = idle.Backoff(ceiling=30, floor=30)
        progress.submit("x")
        started = time.monotonic()
        progress._overlay_wait.wait()
        self.assertLess(time.monotonic() - started, 15)

    def test_the_control_channel_is_the_backends(self):
        backend = type("Backend", (), {"_control": "channel", "poll": lambda self: None})()
        progress = self.module._KVCRProgress(backend.poll)
        self.assertEqual(progress._overlay_wait._control, "channel")

    def test_refuses_other_shapes(self):
        for old, new in (
            ("class _KVCRProgress", "class Progress"),
            ("def _run_one_iteration(self)", "def _run_one_iteration(self, budget)"),
            ("def _publish_completed(self, limit)", "def _publish_completed(self)"),
            ("self._in_flight_ops = {}", "self._ops = {}"),
            ("while self._run_one_iteration():", "while self.step():"),
        ):
            with self.subTest(new), self.assertRaises(ShapeError):
                patches.kvcr_progress_wait(module_from(PROGRESS.replace(old, new)))


TIER = """
class _FrameworkPinAdapter:
    def __init__(self, tier):
        self._pending_pins = {}
        self._completed_pins = []
        self._pin_job_results = []
        self._pin_jobs = {}
    def has_active_pins(self):
        return bool(self._pin_jobs)
class KVCRSecondaryTierManager:
    def __init__(self):
        self._framework_pin_adapter = _FrameworkPinAdapter(self)
        self._finished_jobs = []
        self._jobs_by_op = {}
    def has_pending_work(self):
        return True
"""


class KvcrRealWork(unittest.TestCase):
    def setUp(self):
        module = module_from(TIER)
        patches.kvcr_real_work(module)
        self.tier = module.KVCRSecondaryTierManager()

    def test_everybody_else_still_hears_true(self):
        self.assertIs(self.tier.has_pending_work(), True)

    def test_asked_for_real_work_an_idle_tier_has_none(self):
        with idle.REAL_WORK:
            self.assertIs(self.tier.has_pending_work(), False)

    def test_each_kind_of_work_counts(self):
        pins = self.tier._framework_pin_adapter
        for owner, name, value in (
            (self.tier, "_jobs_by_op", {1: 1}),
            (self.tier, "_finished_jobs", [1]),
            (pins, "_pending_pins", {1: 1}),
            (pins, "_completed_pins", [1]),
            (pins, "_pin_job_results", [1]),
            (pins, "_pin_jobs", {"a": 1}),
        ):
            with self.subTest(name), mock.patch.object(owner, name, value), idle.REAL_WORK:
                self.assertIs(self.tier.has_pending_work(), True)

    def test_refuses_other_shapes(self):
        for old, new in (("def has_pending_work(self)", "def has_pending_work(self, strict)"), ("def has_active_pins", "def active_pins"),
                         ("self._jobs_by_op = {}", "self._jobs = {}"), ("self._completed_pins = []", "self._done = []")):
            with self.subTest(new), self.assertRaises(ShapeError):
                patches.kvcr_real_work(module_from(TIER.replace(old, new)))


CORE = """
import queue
class EngineCoreRequestType:
    WAKEUP = "wakeup"
class EngineCoreProc:
    process_input_queue_block = True
    def __init__(self, tier):
        self.input_queue = queue.Queue()
        self.tier = tier
        self.requests = 0
        self.running = True
        self.handled = []
    def has_work(self):
        return bool(self.requests) or self.tier.has_pending_work()
    def is_running(self):
        return self.running
    def _process_input_queue(self):
        while not self.has_work() and self.is_running():
            req = self.input_queue.get(block=self.process_input_queue_block)
            self._handle_client_request(*req)
        while not self.input_queue.empty():
            self._handle_client_request(*self.input_queue.get_nowait())
    def _handle_client_request(self, request_type, request):
        self.handled.append((request_type, request))
"""


class EngineIdleWait(unittest.TestCase):
    LONG = 30.0

    def setUp(self):
        patcher = mock.patch.object(idle, "COMPLETIONS", idle.Bell())
        patcher.start()
        self.addCleanup(patcher.stop)
        module = module_from(CORE)
        patches.engine_idle_wait(module)
        self.tier = SimpleNamespace(jobs=False)
        self.tier.has_pending_work = lambda: self.tier.jobs or not idle.REAL_WORK.asked
        self.core = module.EngineCoreProc(self.tier)
        self.core._process_input_queue()  # the first round registers with the bell
        self.core._overlay_backoff = idle.Backoff(ceiling=self.LONG, floor=self.LONG)

    def timed(self) -> float:
        started = time.monotonic()
        self.core._process_input_queue()
        return time.monotonic() - started

    def test_only_polling_waits_for_the_back_off_and_then_lets_the_step_happen(self):
        self.core._overlay_backoff = idle.Backoff(ceiling=0.05, floor=0.05)
        self.assertGreater(self.timed(), 0.04)
        self.assertEqual(self.core.handled, [])

    def test_a_request_ends_the_wait_and_keeps_its_place(self):
        self.core.input_queue.put(("add", 1))
        self.core.input_queue.put(("add", 2))
        self.assertLess(self.timed(), self.LONG / 2)
        self.assertEqual(self.core.handled, [("add", 1), ("add", 2)])

    def test_a_completion_ends_the_wait(self):
        idle.COMPLETIONS.ring()
        self.assertLess(self.timed(), self.LONG / 2)
        self.assertEqual(self.core.handled, [("wakeup", None)])

    def test_requests_or_jobs_are_not_waited_on(self):
        self.core.requests = 1
        self.assertLess(self.timed(), self.LONG / 2)
        self.core.requests, self.tier.jobs = 0, True
        self.assertLess(self.timed(), self.LONG / 2)

    def test_shutdown_and_non_blocking_engines_are_left_to_upstream(self):
        self.core.running = False
        self.assertLess(self.timed(), self.LONG / 2)
        self.core.running, self.core.process_input_queue_block = True, False
        self.assertLess(self.timed(), self.LONG / 2)

    def test_an_engine_without_any_work_blocks_where_upstream_blocks(self):
        self.tier.has_pending_work = lambda: False
        self.core.input_queue.put(("add", 1))
        real = self.core._handle_client_request

        def stop(kind, request):
            real(kind, request)
            self.core.running = False

        self.core._handle_client_request = stop
        with mock.patch.object(queue.Queue, "get", autospec=True, side_effect=queue.Queue.get) as get:
            self.core._process_input_queue()
        self.assertEqual([call.kwargs for call in get.call_args_list], [{"block": True}])

    def test_work_resets_the_back_off(self):
        backoff = self.core._overlay_backoff = idle.Backoff(ceiling=self.LONG)
        for _ in range(100):
            backoff.next()
        self.core.requests = 1
        self.core._process_input_queue()
        self.assertEqual(backoff.next(), idle.FLOOR_SECONDS)

    def test_refuses_other_shapes(self):
        for old, new in (
            ("class EngineCoreProc", "class Core"),
            ("def _process_input_queue(self)", "def _process_input_queue(self, block)"),
            ("def _handle_client_request(self, request_type, request)", "def _handle_client_request(self, request)"),
            ("def is_running(self)", "def running(self)"),
            ('    WAKEUP = "wakeup"', "    pass"),
            ("self.process_input_queue_block)", "True)"),
        ):
            with self.subTest(new), self.assertRaises(ShapeError):
                patches.engine_idle_wait(module_from(CORE.replace(old, new)))


BROADCAST = """
import time
def sched_yield():
    yields.append(1)
yields = []
class SpinCondition:
    def __init__(self, is_reader, context, notify_address, busy_loop_s=1):
        self.is_reader = is_reader
        self.last_read = time.monotonic()
        self.busy_loop_s = busy_loop_s if is_reader else 0
        self.polled = []
        self.poller = self.polled
    def wait(self, timeout_ms=None):
        if time.monotonic() <= self.last_read + self.busy_loop_s:
            sched_yield()
        else:
            self.poller.append(timeout_ms)
"""


class ShmReaderWait(unittest.TestCase):
    def setUp(self):
        self.module = module_from(BROADCAST)
        patches.shm_reader_wait(self.module)
        self.reader = self.module.SpinCondition(True, None, "address")

    def test_just_after_a_message_it_sleeps_briefly(self):
        self.reader.last_read = time.monotonic() + 60
        with mock.patch.object(time, "sleep") as sleep:
            self.reader.wait()
        sleep.assert_called_once_with(idle.READER_LOOK_SECONDS)
        self.assertEqual((self.reader.polled, self.module.yields), ([], []))

    def test_soon_after_it_waits_for_the_notification_but_not_for_ever(self):
        self.reader.last_read = time.monotonic() - 2 * idle.READER_LOOKING_SECONDS
        self.reader.wait()
        self.reader.wait(timeout_ms=7)
        self.reader.wait(timeout_ms=60_000)
        limit = idle.READER_RECHECK_MILLISECONDS
        self.assertEqual(self.reader.polled, [limit, 7, limit])

    def test_writers_are_left_alone(self):
        self.assertEqual(self.module.SpinCondition(False, None, "address").busy_loop_s, 0)

    def test_refuses_other_shapes(self):
        for old, new in (("class SpinCondition", "class Condition"), ("timeout_ms=None):", "timeout=None):\n        timeout_ms = timeout"),
                         (", busy_loop_s=1", ""), ("def sched_yield()", "def sched_yield(n)"), ("self.poller.append", "self.polled.append")):
            text = BROADCAST.replace(old, new)
            if new == "":
                text = text.replace("busy_loop_s if is_reader else 0", "1")
            with self.subTest(new), self.assertRaises(ShapeError):
                patches.shm_reader_wait(module_from(text))


if __name__ == "__main__":
    unittest.main()
