"""The fixtures `ranks` and `processes`: one test, many machines.

minidist is imported inside the functions: `--impl` first decides which one that is.
"""

import cloudpickle
import pytest

from tests.comm import conformance

cloudpickle.register_pickle_by_value(conformance)  # or each new rank would import pytest


def pytest_generate_tests(metafunc):
    from tests.comm.conformance.machines import MACHINES, chosen, lacks, marks

    names = chosen(metafunc.config.option.machine)
    if "machine" in metafunc.fixturenames:
        metafunc.parametrize("machine", names)
    here = [name for name in names if not lacks(name)]
    processes = [name for name in here if MACHINES[name].transport != "thread"]
    for fixture, found in {"ranks": here, "processes": processes}.items():
        if fixture in metafunc.fixturenames:
            marked = [pytest.param(name, marks=marks(name)) for name in found]
            metafunc.parametrize(fixture, marked, indirect=True, scope="module")


@pytest.fixture(scope="module")
def ranks(request, cluster):
    """Return a function: ranks(size) gives a cluster of this machine."""
    from tests.comm.conformance.machines import Ranks

    return Ranks(request.param, cluster)


processes = ranks
