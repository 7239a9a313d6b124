"""The bytes of a chunk depend on its array alone."""

import subprocess
import sys

# In a process of its own: whoever imports zarr, as other tests do, has turned blosc's threads off already.
ENCODE = """
from concurrent.futures import ThreadPoolExecutor
import numpy as np
from metaloom.storage.format.chunks import encode_chunk

array = np.cumsum(np.random.default_rng(0).standard_normal(5_000_000, np.float32))
with ThreadPoolExecutor(1) as elsewhere:
    there, _ = elsewhere.submit(encode_chunk, array, compressed=True).result()
print(len({there[0], *(encode_chunk(array, compressed=True)[0][0] for _ in range(5))}))
"""


def test_large_arrays_have_the_same_bytes_every_time_and_in_every_thread():
    found = subprocess.run([sys.executable, "-c", ENCODE], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "1"
