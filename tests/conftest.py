"""Fixtures that every test may use: devices, and ranks that stay up for the whole session."""

import os
import shutil
import signal
import sys
import tempfile
import zlib
from pathlib import Path

import pytest
from hypothesis import Phase, settings

from tests import grids, guard

TESTS = Path(__file__).parent
# minidist is imported inside the fixtures: `--impl` first decides which one that is.

settings.register_profile(
    "repo", deadline=None, max_examples=25, derandomize=True, print_blob=True, database=None
)
settings.register_profile("deep", deadline=None, max_examples=500)
settings.register_profile(  # of mutants: any example kills
    "first failure", settings.get_profile("repo"), phases=[Phase.explicit, Phase.generate]
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repo"))


def pytest_addoption(parser):
    parser.addoption(
        "--impl",
        metavar="DIR",
        help="test minidist with its files replaced by those in DIR/minidist, a student's folder "
        "or a whole one of mistakes/overlay.py (write --impl=DIR, or pytest takes DIR for tests)",
    )
    parser.addoption(
        "--device",
        choices=["strict"],
        help="run the tests marked gpu on tests/strict_device, a stand-in for CuPy, never a GPU",
    )
    parser.addoption(
        "--machine",
        action="append",
        default=[],
        metavar="NAME",
        help="run the conformance suite on this machine of tests/comm/conformance/machines.py; may "
        "be repeated (default: all but the MPI machines)",
    )
    parser.addoption(
        "--record-ledgers",
        action="store_true",
        help="write what the cases that run send into tests/ledgers.txt, without comparing",
    )
    parser.addoption(
        "--all",
        action="store_true",
        help="run all cases of the grids, not those that the commit chooses (tests/grids.py)",
    )
    parser.addoption(
        "--one-in",
        type=int,
        default=1,
        metavar="N",
        help="run one test in N, the same ones in every run: a sample for other Pythons",
    )


def pytest_configure(config):
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # we are a job behind "&"
        signal.signal(signal.SIGINT, signal.default_int_handler)  # tests send it to their children
    config.add_cleanup(guard.start())
    config.option.loadscopereorder = False  # xdist: ours is the order in which files are started
    if config.option.impl is not None:
        _replace_files(config)
    if config.option.device == "strict":
        if not shutil.which("g++"):
            raise pytest.UsageError("--device strict compiles kernels with g++: install it")
        _import_first(str(TESTS / "strict_device"))
    if any(name.startswith("mpi") for name in config.option.machine):
        from tests.one_report import OneReport

        config.pluginmanager.register(OneReport(config))


def _replace_files(config):
    overlay, tree, files = _overlay(), Path(config.option.impl).absolute(), ["all files"]
    try:
        if not overlay.is_built(tree):
            files = overlay.replaced(tree)
            holder = tempfile.TemporaryDirectory(prefix="minidist-impl-")
            config.add_cleanup(holder.cleanup)
            tree = overlay.build(Path(holder.name), files)
    except (ValueError, OSError) as error:
        raise pytest.UsageError(f"--impl {config.option.impl}: {error}") from None
    config.stash[REPLACED] = list(files)
    config.option.importmode = "append"  # the tests' own root goes behind it
    _import_first(str(tree))
    os.environ["PYTHONSAFEPATH"] = "1"  # else ranks would find the checkout's, where they start


def _import_first(folder: str):
    """Let this process and those it starts, ranks and workers of xdist, look for modules here."""
    sys.path.insert(0, folder)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [folder, *filter(None, [os.environ.get("PYTHONPATH")])]
    )


LONGEST = """lessons/test_lessons course/test_labs course/test_attacks
course/test_grader cli/test_cli course/test_lab_command pipeline_parallel/test_equivalence
data_parallel/test_zero comm/conformance/test_places
hybrid/test_hybrid course/test_mutants gpu/test_strict_device""".split()


NEED_GPU = pytest.StashKey[int]()  # how many tests were left out because there is no GPU


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config, items):
    """Start the files that take longest first: `--dist loadfile` gives a file to one worker. Leave
    out what is marked gpu where there is no GPU; one line at the end says how many tests.
    """
    for item in items:
        if "gpu" in item.fixturenames and not item.get_closest_marker("gpu"):
            raise pytest.UsageError(f"{item.nodeid} needs a GPU; mark it gpu")

    def place(item):
        name = os.path.relpath(item.path.with_suffix(""), TESTS)
        return LONGEST.index(name) if name in LONGEST else len(LONGEST)

    items.sort(key=place)
    result = yield  # -m and -k have chosen
    if others := [item for item in items if _number_of(item) % config.option.one_in]:
        items[:] = [item for item in items if _number_of(item) % config.option.one_in == 0]
        config.hook.pytest_deselected(items=others)
    if not config.option.all and (others := grids.left_out(items)):
        items[:] = [item for item in items if item not in others]
        config.hook.pytest_deselected(items=list(others))
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and _why_no_gpu():
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
        config.hook.pytest_deselected(items=on_gpu)
        config.stash[NEED_GPU] = len(on_gpu)
    return result


def _number_of(item) -> int:
    return zlib.crc32(item.nodeid.encode())  # of every Python and every run alike


def _why_no_gpu() -> str | None:
    from minidist.backend import why_no_gpu

    return why_no_gpu()


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):  # of xdist, whose main process collects nothing
        session.config.workeroutput["need a GPU"] = session.config.stash.get(NEED_GPU, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    number = getattr(node, "workeroutput", {}).get("need a GPU", 0)
    node.config.stash[NEED_GPU] = max(number, node.config.stash.get(NEED_GPU, 0))


def pytest_terminal_summary(terminalreporter, config):
    if number := config.stash.get(NEED_GPU, 0):
        line = f"{number} tests need a GPU: {_why_no_gpu()}"
        terminalreporter.write_line(f"{line}; --device strict runs them on a stand-in")


REPLACED = pytest.StashKey[list]()


def _overlay():
    """Load overlay.py by itself: importing minidist would decide which one is tested."""
    import importlib.util

    path = Path(__file__).parents[1] / "minidist" / "verify" / "mistakes" / "overlay.py"
    spec = importlib.util.spec_from_file_location("overlay", path)
    overlay = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(overlay)
    assert "minidist" not in sys.modules, f"{path.name} imports minidist: --impl replaces nothing"
    return overlay


def pytest_report_header(config):
    lines = [] if config.option.all else [f"grids: cases of commit {grids.commit()[:12] or 'none'}"]
    if config.option.impl is not None:
        replaced = ", ".join(config.stash[REPLACED])
        lines.append(f"minidist with {replaced} of {config.option.impl}")
    if config.option.device == "strict":
        lines.append("device: a stand-in for CuPy, never a GPU (tests/strict_device)")
    return lines


@pytest.fixture(scope="session")
def ledgers(request):
    """Return what compares the bytes of a row, by operation, with those of tests/ledgers.txt."""
    from tests.ledgers import Ledgers

    ledgers = Ledgers(request.config.option.record_ledgers)
    yield ledgers
    ledgers.save()


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request):
    """Run a test on the host and, where there is one, on a GPU."""
    return request.param


@pytest.fixture
def gpu():
    """Ask for a GPU. What uses this is marked gpu, and left out where there is none."""


@pytest.fixture
def place(device):
    """Return a function that puts a NumPy array on the device of the test."""
    from minidist.backend import to_device

    return lambda array: to_device(array, device)


RANKS_ON_A_GPU = 12


@pytest.fixture(scope="session")
def cluster():
    """Return a function: cluster(size, transport, device) gives ranks that stay up until the
    session ends. Of those on a GPU the oldest are closed: CUDA takes 0.5 GB of it for a process.
    """
    from minidist import Cluster

    clusters = {}

    def get(size: int, transport: str = "process", device: str = "cpu") -> Cluster:
        kind = size, transport, device
        if kind not in clusters:
            on_gpu = [other for other in clusters if device != "cpu" and other[2] != "cpu"]
            while on_gpu and size + sum(other[0] for other in on_gpu) > RANKS_ON_A_GPU:
                clusters.pop(on_gpu.pop(0)).close()
            clusters[kind] = Cluster(*kind)
            if device != "cpu":  # a process comes to a busy GPU in seconds; tests bound their runs
                clusters[kind].run(lambda group: None)
        return clusters[kind]

    yield get
    for ranks in clusters.values():
        ranks.close()


@pytest.fixture(autouse=True, scope="session")
def look_often():
    """Look for deadlocks every 0.1 s, not 0.4: there are many to be found in these tests."""
    from minidist.comm import cluster

    usual, cluster.LOOK_EVERY = cluster.LOOK_EVERY, 0.1
    yield
    cluster.LOOK_EVERY = usual


@pytest.fixture(autouse=True, scope="session")
def judges_are_loaded():
    """Let the fork server import what most ranks of these tests would import, each for itself."""
    from minidist.comm.local import processes

    processes.PRELOAD.append("minidist.verify.equivalence")
    yield
    processes.PRELOAD.remove("minidist.verify.equivalence")


@pytest.fixture(autouse=True, scope="session")
def one_blas_thread():
    """Give BLAS one thread here, as ranks have: workers of xdist share the cores, and a product
    that waits for a core which another worker has takes milliseconds.
    """
    from threadpoolctl import threadpool_limits

    with threadpool_limits(1):
        yield
