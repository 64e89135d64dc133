"""What the host engine's helper threads do to the program around them."""

from __future__ import annotations

import subprocess
import sys

# The first half of the source is out of bounds, and the first of two threads is a helper.
TOUCHES_WHAT_IS_WATCHED = """
import ctypes, faulthandler, mmap
import numpy as np
import kvbm_kernels as kk

faulthandler.enable()
memory = mmap.mmap(-1, 4 << 20)
source = np.frombuffer(memory, np.uint8)
target = np.empty_like(source)
libc = ctypes.CDLL(None, use_errno=True)
assert libc.mprotect(ctypes.c_void_p(source.ctypes.data), ctypes.c_size_t(2 << 20), 0) == 0
shape = kk.BlockShape(1, 1, 1, 1, source.size, "uint8")
kk.copy_blocks(kk.UniversalBlocks([target], shape), kk.UniversalBlocks([source], shape), num_threads=2)
"""


def test_a_fault_in_a_helper_reaches_its_handler():
    """A handler for faults, such as a write barrier's or a crash report's, works for all threads of a copy."""
    result = subprocess.run(
        [sys.executable, "-c", TOUCHES_WHAT_IS_WATCHED], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode != 0
    assert "Segmentation fault" in result.stderr or "AddressSanitizer" in result.stderr


def test_signals_of_others_go_to_the_caller():
    """A signal to the process during a copy is handled by one of the program's own threads."""
    program = """
import os, signal, threading
import numpy as np
import kvbm_kernels as kk

seen = []
signal.signal(signal.SIGUSR1, lambda *_: seen.append(threading.current_thread() is threading.main_thread()))
shape = kk.BlockShape(1, 1, 1, 1, 32 << 20, "uint8")
a, b = np.ones(32 << 20, np.uint8), np.empty(32 << 20, np.uint8)
dst, src = kk.UniversalBlocks([b], shape), kk.UniversalBlocks([a], shape)
stop = threading.Event()
def send():
    while not stop.wait(0.001):
        os.kill(os.getpid(), signal.SIGUSR1)
sender = threading.Thread(target=send)
sender.start()
for _ in range(30):
    kk.copy_blocks(dst, src, num_threads=4)
stop.set()
sender.join()
assert seen and all(seen)
assert (b == 1).all()
"""
    subprocess.run([sys.executable, "-c", program], timeout=60, check=True)
