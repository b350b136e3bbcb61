"""Time training steps against their own products, PyTorch and JAX: one core, float32.

Times are a process's own, on its core, because only one of its threads works at a time: what else
runs on the machine has its effect on the caches alone.

The ratio to a peer depends on the processor, for which each has another BLAS. The share of a step's
own products does not: they are computed by the BLAS that the step has.
"""

import contextlib
import importlib.util
import json
import platform
import re
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from threadpoolctl import threadpool_info, threadpool_limits

from minidist.backend import keep_freed_memory
from minidist.bench import workloads
from minidist.bench.rows import Rounds, Step, Works, remark, rounds_of, times_of
from minidist.bench.run_peer import jax_peer, torch_peer
from minidist.bench.workloads import STEPS, Work, makers
from minidist.observe.products import products_of, replay
from minidist.observe.stopwatch import ProcessClock

TITLE = "one core, float32, time on it"
ALONE = "{}: products"  # what the products of a workload are called among the times
AIMS: dict[str, dict[str, float | None]] = {  # {workload: {contestant: the largest ratio}}
    "mlp_step": {"products": None, "PyTorch": 1.0, "torch.compile": None, "JAX": None},
    "transformer_step": {
        "products": 1 / 0.75,
        "PyTorch": 0.92,
        "torch.compile": 0.95,
        "JAX": 0.4,
    },
    "convolution_step": {"products": None, "PyTorch": 1.3},
    "chain_step": {"PyTorch": 0.45},
}


def rows(rounds: int = 5) -> Iterator[dict]:
    """Yield what the machine is; then for each workload a row per contestant."""
    yield remark("machine", machine())
    keep_freed_memory()
    works = makers(workloads, STEPS)
    ours = partial(times_of, with_products(works), clock=ProcessClock)
    compiled = json.dumps(works_of("torch.compile", compiled=True))
    peers = {
        "PyTorch": torch_peer("steps", "cpu", json.dumps(works_of("PyTorch"))),
        "torch.compile": torch_peer("steps", "cpu", compiled, compiles=True),
        "JAX": jax_peer(json.dumps(works_of("JAX"))),
    }
    found = rounds_of(rounds, ours=ours, **peers)
    for name, (function, _) in STEPS.items():
        for contestant, aim in AIMS[function].items():
            if contestant == "products":
                yield of_products(found, name, aim, peak_bytes(works[name]))
            else:
                yield found.row(name, name, contestant, aim)


def works_of(contestant: str, **more) -> dict[str, Work]:
    """Return the workloads that a contestant has, with more arguments."""
    return {
        name: (function, arguments | more)
        for name, (function, arguments) in STEPS.items()
        if contestant in AIMS[function]
    }


def with_products(works: Works) -> Works:
    """Return the workloads, each followed by its products alone."""
    have, found = works_of("products"), {}
    for name, make in works.items():
        found[name] = make
        if name in have:
            found[ALONE.format(name)] = partial(products_alone, make)
    return found


def products_alone(make: Callable[[], Step]) -> Step:
    """Return a call that computes only the products of a step: the second, as it is timed."""
    step = make()
    step()
    return replay(products_of(step))


def of_products(found: Rounds, name: str, aim: float | None, peak: int) -> dict:
    """Return the row of a step beside its products, and what its arrays take at most."""
    row = found.row(name, name, "ours", aim, theirs=ALONE.format(name))
    words = f"products {100 / row['ratio']:.0f} %, peak {peak / 1e6:.0f} MB"
    return row | {"peer": "products", "note": words}


def peak_bytes(make: Callable[[], Step]) -> int:
    """Return the most bytes that are held at once in a step, with weights and optimizer.

    tracemalloc, to which NumPy reports its arrays, is off while steps are timed.
    """
    tracemalloc.start()
    try:
        with threadpool_limits(1):
            step = make()
            step()  # makes what stays: gradients, the optimizer's state
            tracemalloc.reset_peak()
            step()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def machine() -> str:
    """Return the names of the processor, of NumPy's BLAS, and the versions of peers."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(encoding="utf-8") if cpuinfo.exists() else ""
    models = re.findall(r"^model name\s*: (.*)", text, re.MULTILINE) or [platform.machine()]
    kernels = [
        f"{pool['internal_api']} {pool['version']} ({pool.get('architecture', 'one kernel')})"
        for pool in threadpool_info()
        if pool["user_api"] == "blas"
    ]
    packages = [name for name in ("torch", "jax") if importlib.util.find_spec(name)]
    with contextlib.suppress(PackageNotFoundError):
        kernels += [f"{name} {version(name)}" for name in packages]
    return ", ".join([models[0], *kernels])
