import resource
import subprocess
import sys

import pytest

# A tensor of 16 MiB, made and dropped again and again; prints the page faults of a time.
PROGRAM = """
import resource, sys, torch
from invdist.process import settle

if sys.argv[1] == "settled":
    settle(threads=1)

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

rows = torch.ones(4_000_000)
for turn in range(25):
    if turn == 5:
        before = faults()
    a, b = rows + 1, rows + 2
    del a, b
print((faults() - before) / 20, torch.get_num_threads())
"""


def run(how: str) -> tuple[float, int]:
    done = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True)
    faults, threads = done.stdout.split()
    return float(faults), int(threads)


def test_a_settled_process_keeps_the_memory_it_has_used() -> None:
    pages = 2 * 16_000_000 / resource.getpagesize()
    left_alone, _ = run("left alone")
    if left_alone < pages / 10:
        pytest.skip("this machine's allocator keeps memory by itself, or its pages are huge")
    settled, threads = run("settled")
    assert settled < left_alone / 10
    assert threads == 1
