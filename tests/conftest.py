"""Fixtures that every test may use: devices, and ranks that stay up for the whole session."""

import os

import pytest
from hypothesis import settings

from minidist import Cluster
from minidist.backend import to_device, why_no_gpu

settings.register_profile(
    "repo", deadline=None, max_examples=25, derandomize=True, print_blob=True, database=None
)
settings.register_profile("deep", deadline=None, max_examples=500)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repo"))


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request):
    """Run a test on the host and, where there is one, on a GPU."""
    if request.param == "gpu" and (reason := why_no_gpu()):
        pytest.skip(f"no GPU: {reason}")
    return request.param


@pytest.fixture
def place(device):
    """Return a function that puts a NumPy array on the device of the test."""
    return lambda array: to_device(array, device)


@pytest.fixture(scope="session")
def cluster():
    """Return a function: cluster(size, transport) gives ranks that stay up until the session
    ends.
    """
    clusters = {}

    def get(size: int, transport: str = "process") -> Cluster:
        if (size, transport) not in clusters:
            clusters[size, transport] = Cluster(size, transport)
        return clusters[size, transport]

    yield get
    for ranks in clusters.values():
        ranks.close()
