"""Being here puts this folder on the import path, so that every test can import ``helpers``."""

import os

# before torch is imported: threads that spin for busy cores make tiny products many times slower
os.environ.setdefault("OMP_NUM_THREADS", "1")
