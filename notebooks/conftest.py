"""For `pytest --nbval notebooks`: kernels of lessons talk over Unix sockets.

Over TCP the ports of a kernel are chosen before it starts. Ranks of another lesson can take one meanwhile, and then the
kernel may never answer ("Kernel didn't respond in 60 seconds").
"""

import tempfile
from functools import partial

import nbval.kernel
import pytest
from jupyter_client import KernelManager


def pytest_configure(config: pytest.Config) -> None:
    folder = tempfile.TemporaryDirectory(dir="/tmp")  # of a short name: a socket's path has at most 107 characters
    config.add_cleanup(folder.cleanup)
    nbval.kernel.KernelManager = partial(KernelManager, transport="ipc", ip=f"{folder.name}/kernel")
