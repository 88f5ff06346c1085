"""Subject of bench.engine: what the machine can do at most, to torch: float32 matrix products, reading memory."""

import torch

from bench.engine_plan import Measured, samples, subject_plan

READ_BYTES = 1 << 30
RUNS = 5


def main() -> None:
    """FLOP/s of the best product shape, bytes/s of the fastest read; by run."""
    plan = subject_plan()
    torch.set_num_threads(plan.threads)
    measured = Measured()
    with torch.inference_mode():
        for size in (1024, 2048, 4096):
            a, b = torch.randn(size, size), torch.randn(size, size)
            times = samples(lambda a=a, b=b: torch.mm(a, b), RUNS, 1)  # type: ignore[misc]
            measured.extra[f"gemm_{size}"] = [2 * size**3 / s for s in times]
        data = torch.ones(READ_BYTES // 4)
        measured.extra["read_sum"] = [READ_BYTES / s for s in samples(data.sum, RUNS, 1)]
        other = torch.ones(READ_BYTES // 4)
        measured.extra["read_dot"] = [2 * READ_BYTES / s for s in samples(lambda: torch.dot(data, other), RUNS, 1)]
        measured.extra["read_max"] = [READ_BYTES / s for s in samples(data.max, RUNS, 1)]
    measured.tell()


if __name__ == "__main__":
    main()
