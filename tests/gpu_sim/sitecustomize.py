"""Installs the simulated GPU in every process whose PYTHONPATH begins with this folder and whose
environment has KVPLANE_SIMULATED_GPU, such as the planes that a test starts.
"""

import os
from importlib.util import find_spec

if os.environ.get("KVPLANE_SIMULATED_GPU") and find_spec("torch") is not None:
    import simulated_gpu

    simulated_gpu.install()
