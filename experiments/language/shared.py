"""The runner of several trainings at a time, which is that of the experiments on CIFAR-10."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "cifar10"))  # last, so that modules of this folder come first

from jobs import Job, divergence, run_jobs, shared_gpu

__all__ = ["Job", "divergence", "run_jobs", "shared_gpu"]
