"""What a kernel must see while outputs are stored and while they are checked."""

import os

os.environ["ICML25_QUIET"] = "1"
os.environ["ICML25_SCALE"] = "laptop"
for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[name] = "1"
