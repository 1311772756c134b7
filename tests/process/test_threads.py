"""What the threads of a process are doing."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import faulthandler, gc, threading, time
from envactors.system.threads import current_frames

class Cycle:
    def __init__(self):
        self.me = self

    def __del__(self):
        time.sleep(0)  # gives other threads a turn in the middle of a collection

def start_threads():
    while not done:
        thread = threading.Thread(target=len, args=((),))
        thread.start()
        thread.join()

faulthandler.dump_traceback_later(60, exit=True)
gc.set_threshold(1)
done = False
threads = [threading.Thread(target=start_threads) for _ in range(2)]
for thread in threads:
    thread.start()
for _ in range(2000):
    Cycle()
    assert threading.get_ident() in current_frames()
assert gc.isenabled()
done = True
"""


def test_a_garbage_collection_while_frames_are_read_stops_no_thread():
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=100)
