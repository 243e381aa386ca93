"""The waits: back-off, bells, and what ends KVCR's progress wait."""

import threading
import time
import unittest

from support import needs

from kvcr_cpu import idle


class BackoffTest(unittest.TestCase):
    def test_stays_at_the_floor_then_doubles_to_the_ceiling(self):
        backoff = idle.Backoff(ceiling=0.01, floor=0.001, quiet_rounds=2)
        self.assertEqual([backoff.next() for _ in range(7)], [0.001, 0.001, 0.002, 0.004, 0.008, 0.01, 0.01])

    def test_reset_starts_again(self):
        backoff = idle.Backoff(ceiling=1, floor=0.001, quiet_rounds=0)
        self.assertEqual([backoff.next(), backoff.next()], [0.002, 0.004])
        backoff.reset()
        self.assertEqual(backoff.next(), 0.002)

    def test_floor_equal_to_ceiling(self):
        backoff = idle.Backoff(ceiling=0.001)
        self.assertEqual({backoff.next() for _ in range(20)}, {0.001})

    def test_nonsense_is_refused(self):
        for floor, ceiling, rounds in ((0, 1, 1), (-1, 1, 1), (2, 1, 1), (1, 2, -1)):
            with self.subTest(floor=floor, ceiling=ceiling, rounds=rounds), self.assertRaises(ValueError):
                idle.Backoff(ceiling=ceiling, floor=floor, quiet_rounds=rounds)


class BellTest(unittest.TestCase):
    def test_rings_every_listener_and_needs_none(self):
        bell = idle.Bell()
        bell.ring()
        heard: list[str] = []
        bell.listen(lambda: heard.append("a"))
        bell.listen(lambda: heard.append("b"))
        bell.ring()
        self.assertEqual(heard, ["a", "b"])


class RealWorkTest(unittest.TestCase):
    def test_is_asked_only_inside_and_also_after_an_error(self):
        asked = idle.RealWork()
        self.assertFalse(asked.asked)
        with self.assertRaises(KeyError), asked:
            self.assertTrue(asked.asked)
            raise KeyError
        self.assertFalse(asked.asked)


class AnnouncingQueueTest(unittest.TestCase):
    def test_announces_after_the_item_is_there(self):
        queue = idle.AnnouncingQueue()
        sizes: list[int] = []
        queue.announce = lambda: sizes.append(queue.qsize())
        queue.put("a")
        queue.put("b", block=False)
        self.assertEqual((sizes, queue.get(), queue.get_nowait()), ([1, 2], "a", "b"))


@needs("zmq")
class ProgressWaitTest(unittest.TestCase):
    LONG = 30.0

    def timed(self, wait: idle.ProgressWait) -> float:
        started = time.monotonic()
        wait.wait()
        return time.monotonic() - started

    def patient(self, control: object = None) -> idle.ProgressWait:
        """A wait whose back-off alone would not end within a test."""
        wait = idle.ProgressWait(control)
        self.addCleanup(wait.close)
        wait._backoff = idle.Backoff(ceiling=self.LONG, floor=self.LONG)
        return wait

    def test_without_events_the_back_off_ends_it(self):
        wait = idle.ProgressWait(None)
        self.addCleanup(wait.close)
        self.assertLess(self.timed(wait), 5)

    def test_an_announcement_from_before_ends_it(self):
        wait = self.patient()
        wait.announce()
        wait.announce()
        self.assertLess(self.timed(wait), self.LONG / 2)

    def test_announcements_are_consumed(self):
        wait = self.patient()
        wait.announce()
        wait.wait()
        wait._backoff = idle.Backoff(ceiling=0.05, floor=0.05)
        self.assertGreater(self.timed(wait), 0.04)

    def test_an_announcement_during_the_wait_ends_it(self):
        wait = self.patient()
        waiting = threading.Thread(target=wait.wait)
        waiting.start()
        wait.announce()
        waiting.join(self.LONG / 2)
        self.assertFalse(waiting.is_alive())

    def test_a_control_message_ends_it_and_stays_for_its_reader(self):
        import zmq

        context = zmq.Context()
        self.addCleanup(context.term)
        receiver = context.socket(zmq.PULL)
        sender = context.socket(zmq.PUSH)
        self.addCleanup(receiver.close, 0)
        self.addCleanup(sender.close, 0)
        port = receiver.bind_to_random_port("tcp://127.0.0.1")
        sender.connect(f"tcp://127.0.0.1:{port}")
        channel = type("Channel", (), {"_socket": receiver})()
        wait = self.patient(channel)
        sender.send(b"start_write")
        self.assertLess(self.timed(wait), self.LONG / 2)
        self.assertEqual(receiver.recv(zmq.NOBLOCK), b"start_write")

    def test_a_channel_without_a_socket_is_looked_at_often(self):
        wait = self.patient(object())
        self.assertLess(max(self.timed(wait) for _ in range(20)), 5)
        self.assertLessEqual(max(wait._blind.next() for _ in range(50)), idle.BLIND_CEILING_SECONDS)

    def test_an_event_resets_the_back_off(self):
        wait = idle.ProgressWait(None)
        self.addCleanup(wait.close)
        for _ in range(200):
            wait._backoff.next()
        wait.announce()
        wait.wait()
        self.assertEqual(wait._backoff.next(), idle.FLOOR_SECONDS)

    def test_announcing_after_close_is_harmless(self):
        wait = idle.ProgressWait(None)
        wait.close()
        wait.close()
        wait.announce()


class CeilingsTest(unittest.TestCase):
    def test_progress_ceiling_is_far_below_kvcr_stall_detection(self):
        # KVCR disables a source whose progress pauses for operation_timeout_ms; its default is 1000.
        self.assertLessEqual(idle.PROGRESS_CEILING_SECONDS, 1.0 / 20)

    def test_reader_looks_longer_than_zeromq_ignores_its_mailbox(self):
        # libzmq: max_command_delay, 3,000,000 ticks of the time stamp counter: 1.5 ms at 2 GHz.
        self.assertGreaterEqual(idle.READER_LOOKING_SECONDS, 0.003)


if __name__ == "__main__":
    unittest.main()
