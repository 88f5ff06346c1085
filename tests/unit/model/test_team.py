"""Threads that wait for each other inside a kernel do not burn the core that the other one needs."""

import os
import subprocess
import sys

STEPS, LAYERS = 10, 8
CODE = f"""
import os, time
from dataclasses import replace
import torch
os.sched_setaffinity(0, {{min(os.sched_getaffinity(0))}})  # after libgomp has counted the cores
torch.set_num_threads(2)
from kvrelay.model.transformer import Transformer
from tests.unit.model.test_compiled import Random, batch_of, config
shape = replace(config(1, 2, 8), hidden=256, intermediate=1100, layers={LAYERS})
model = Transformer(shape, Random(shape), torch.device("cpu"), torch.float64)
pool, batch = torch.zeros(2, {LAYERS}, 2, 1, 16, 8, dtype=torch.float64), batch_of([(20, 1)], 16, [0, 1])
model.forward(batch, pool)
began = time.process_time()
for _ in range({STEPS}):
    model.forward(batch, pool)
print((time.process_time() - began) / {STEPS})
"""


def test_two_threads_on_one_core_do_not_spin_through_their_time_slices() -> None:
    """libgomp's barrier did: some 3 ms of CPU at each of 64 barriers."""
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False, cwd=os.getcwd())
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 0.06
