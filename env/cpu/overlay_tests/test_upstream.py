"""The patches on the installed releases, each check in a fresh interpreter that has the overlay on ``PYTHONPATH``. Slow: it imports vLLM."""

import os
import subprocess
import sys
import tempfile
import textwrap
import unittest
from importlib.util import find_spec

from support import OVERLAY

MISSING = [name for name in ("torch", "vllm", "kvcr", "nixl", "nixl_cu13", "zmq") if find_spec(name) is None]
TIMEOUT_SECONDS = 600


def run(code: str) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as home:
        env = {
            "PATH": os.environ["PATH"], "HOME": home, "TMPDIR": home, "PYTHONPATH": str(OVERLAY), "KVCR_PHASE1_OVERLAY_LOG": "1",
            "VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1",
        }
        script = os.path.join(home, "check.py")  # a file, because multiprocessing's spawn must find it again
        with open(script, "w") as file:
            file.write(textwrap.dedent(code))
        # -B: bytecode beside the overlay would make cargo build the embedded files anew.
        return subprocess.run([sys.executable, "-B", script], env=env, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)


@unittest.skipIf(MISSING, f"not installed: {', '.join(MISSING)}")
class Upstream(unittest.TestCase):
    def test_every_patch_fits(self):
        done = run("""
            import vllm.v1.engine.utils, vllm.v1.engine.core, vllm.distributed.device_communicators.shm_broadcast
            import vllm.v1.kv_offload.tiering.kvcr.manager, kvcr.progress, nixl
            import kvcr_cpu.spec
        """)
        self.assertEqual(done.returncode, 0, done.stderr[-2000:])
        applied = sorted(line.removeprefix("overlay: applied ") for line in done.stderr.splitlines() if line.startswith("overlay: applied"))
        self.assertEqual(
            applied,
            ["cpu-offload-spec", "engine-idle-wait", "kvcr-progress-wait", "kvcr-real-work", "nixl-progress-delay", "shm-reader-wait", "zmq-address-alias"],
        )

    def test_an_idle_nixl_agent_costs_next_to_nothing_and_still_delivers(self):
        done = run("""
            import os, time
            from nixl import nixl_agent, nixl_agent_config
            a, b = (nixl_agent(n, nixl_agent_config(backends=["UCX"])) for n in "ab")
            used = lambda: sum(os.times()[:2])
            before, started = used(), time.monotonic()
            time.sleep(1)
            print("cores", (used() - before) / (time.monotonic() - started))
            a.add_remote_agent(b.get_agent_metadata())
            a.send_notif("b", b"hello")
            deadline = time.monotonic() + 60
            while not (notes := b.get_new_notifs()) and time.monotonic() < deadline:
                time.sleep(0.001)
            print("notes", notes)
        """)
        self.assertEqual(done.returncode, 0, done.stderr[-2000:])
        lines = dict(line.split(" ", 1) for line in done.stdout.splitlines() if line.startswith(("cores", "notes")))
        self.assertLess(float(lines["cores"]), 0.5)  # two agents: two cores without the patch
        self.assertEqual(lines["notes"], str({"a": [b"hello"]}))

    def test_shared_memory_queue_keeps_order_and_pace(self):
        done = run("""
            import multiprocessing, statistics, sys, time

            def echo(handle, back):
                from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
                requests, replies = MessageQueue.create_from_handle(handle, 0), MessageQueue(1, 1, max_chunk_bytes=1 << 16, max_chunks=4)
                back.put(replies.export_handle())
                requests.wait_until_ready()
                replies.wait_until_ready()
                while (item := requests.dequeue(indefinite=True)) is not None:
                    replies.enqueue(item)

            if __name__ == "__main__":
                multiprocessing.set_start_method("spawn")
                from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
                requests, back = MessageQueue(1, 1, max_chunk_bytes=1 << 16, max_chunks=4), multiprocessing.Queue()
                child = multiprocessing.Process(target=echo, args=(requests.export_handle(), back))
                child.start()
                replies = MessageQueue.create_from_handle(back.get(), 0)
                requests.wait_until_ready()
                replies.wait_until_ready()
                for pause in (0, 0.0005, 0.002, 0.006, 0.02):
                    spent = []
                    for number in range(60):
                        started = time.monotonic()
                        requests.enqueue(number)
                        assert replies.dequeue(timeout=60) == number
                        spent.append(time.monotonic() - started)
                        time.sleep(pause)
                    print("median", pause, statistics.median(spent))
                requests.enqueue(None)
                child.join(60)
                sys.exit(child.exitcode)
        """)
        self.assertEqual(done.returncode, 0, done.stderr[-2000:])
        medians = [float(line.split()[2]) for line in done.stdout.splitlines() if line.startswith("median")]
        self.assertEqual(len(medians), 5, done.stdout)
        self.assertLess(max(medians), 0.05)  # one lost notification costs 0.1 s: they must not be the rule


if __name__ == "__main__":
    unittest.main()
