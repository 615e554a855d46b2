"""How fast this machine reads memory: the floor under every decoder, which must read all weights once per pass.

python -m peers.floor 1 2        ->  {"1": 34.1, "2": 48.9}   (GB/s by number of threads)
"""

import json
import sys
import time

import torch

SIDE, REPEATS = 12_288, 7  # 600 MB, beyond any cache


def main() -> None:
    matrix, vector = torch.ones(SIDE, SIDE), torch.ones(SIDE)
    found = {}
    for threads in map(int, sys.argv[1:]):
        torch.set_num_threads(threads)
        seconds = [_once(matrix, vector) for _ in range(REPEATS)]
        found[str(threads)] = round(matrix.nbytes / min(seconds) / 1e9, 2)
    print(json.dumps(found))


def _once(matrix: torch.Tensor, vector: torch.Tensor) -> float:
    """The quicker of a sum and a product with a vector: both read everything once."""
    times = []
    for read in (matrix.sum, lambda: matrix @ vector):
        started = time.perf_counter()
        read()
        times.append(time.perf_counter() - started)
    return min(times)


if __name__ == "__main__":
    main()
