import ctypes
import resource
import subprocess
import sys

import pytest
import torch

from invdist.runtime.process import use_huge_pages

# Six tensors of 16 MB, made and dropped again and again. Prints the page faults of a time.
PROGRAM = """
import resource, torch
from invdist.runtime.process import configure_process

configure_process(threads=1)

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

rows = torch.ones(4_000_000)
for turn in range(25):
    if turn == 5:
        before = faults()
    made = [rows + number for number in range(6)]
    del made
print((faults() - before) / 20, torch.get_num_threads())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="not glibc: its memory is not ours to keep")
def test_a_settled_process_keeps_the_memory_it_has_used() -> None:
    """By itself glibc gives between a twentieth and all of it back each time, as it happens to lie in the heap."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    faults, threads = done.stdout.split()
    assert float(faults) < 6 * 16_000_000 / resource.getpagesize() / 50
    assert threads == "1"


@pytest.mark.parametrize("values", [0, 10, 3 << 20])
def test_huge_pages_change_no_value(values: int) -> None:
    """Also where memory is not aligned, was written to, or is not on the CPU."""
    whole = torch.arange(values + 1, dtype=torch.float32)
    assert torch.equal(use_huge_pages(whole[1:]), torch.arange(1, values + 1, dtype=torch.float32))
    assert use_huge_pages(torch.empty(values, device="meta")).device.type == "meta"
