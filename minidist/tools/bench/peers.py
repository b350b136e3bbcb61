"""The times of MPI, NuMPItron, gloo, DDP and PyTorch's pipelines; for development only.

    mpiexec -n 2 python -m mpi4py -m minidist.tools.bench.peers mpi       (or transport, numpitron)
    python -m minidist.tools.bench.peers gloo 2       (starts two processes; or ddp, pipelines)
    python -m minidist.tools.bench.peers eager        (the steps of `torch_eager.py`, once)
    python -m minidist.tools.bench.peers gpu '{"width": 1024}'           (the workloads of `gpu.py`)

Rank 0 prints one JSON object: {workload: median seconds}.
"""

import json
import sys
import tempfile
from collections.abc import Callable
from itertools import pairwise

import numpy as np

from minidist.tools.bench.comm import BATCH, SIZES, WIDTHS, median_seconds, warm_up


def mpi() -> None:
    """Time MPI's Allreduce in place, and 8 bytes there and back, through mpi4py."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    found = {}
    warm_up(world.Barrier, 20_000)
    for name, nbytes in SIZES.items():
        x = np.ones(nbytes // 4, np.float32)
        found[name] = median_seconds(lambda x=x: world.Allreduce(MPI.IN_PLACE, x), world.Barrier)
    small = np.ones(1)

    def there_and_back():
        if world.rank == 0:
            world.Send(small, 1)
            world.Recv(small, 1)
        elif world.rank == 1:
            world.Recv(small, 0)
            world.Send(small, 0)

    found["8 bytes there and back"] = median_seconds(there_and_back, world.Barrier, 300)
    if world.rank == 0:
        print(json.dumps(found))


def transport() -> None:
    """Time all_reduce through a Group and bare, in turns, on the same ranks; then our steps."""
    from minidist.comm.mpi import is_first
    from minidist.tools.bench import mpi as suite

    found = suite.times_here()
    if is_first():
        print(json.dumps(found))


def numpitron() -> None:
    """Time a step of NuMPItron's Transformer, as its `train_shakespeare.py` takes one.

    Data parallel, it sums the gradient of the embedding, and no other one, over the ranks: less
    work than ours.
    """
    from mpi4py import MPI
    from numpitron import distributed
    from numpitron.nn import Transformer, softmax_cross_entropy
    from numpitron.optimizer import Adam
    from threadpoolctl import threadpool_limits

    from minidist.tools.bench import mpi as suite

    world = MPI.COMM_WORLD

    def step_of(axis: str, tokens: np.ndarray):
        distributed.init(**{f"{axis}_size": world.size})
        random = np.random.default_rng(0)
        sizes = (suite.WIDTH, suite.HEADS, suite.DEPTH, suite.VOCAB, suite.CONTEXT)
        model = Transformer(*sizes, rng=random)
        optimizer = Adam(model, learning_rate=1e-4)
        model.scatter()
        optimizer.scatter()

        def step():
            _, gradient = softmax_cross_entropy(model(tokens[0]), tokens[1])
            model.backward(gradient)
            optimizer.step()

        return step

    tokens = suite.batch()
    with threadpool_limits(1):
        shard = tokens[:, world.rank :: world.size]
        found = {"data parallel": median_seconds(step_of("dp", shard), world.Barrier, 3)}
        found["tensor parallel"] = median_seconds(step_of("tp", tokens), world.Barrier, 3)
    found = suite.slowest(world.allgather(found))
    if world.rank == 0:
        print(json.dumps(found))


def _with_gloo(work: Callable, size: int) -> None:
    """Run work(rank, size) in `size` processes that share a gloo group; print rank 0's result."""
    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_join, (work, size, f"file://{folder}/store"), nprocs=size)


def _join(rank: int, work: Callable, size: int, store: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    found = work(rank, size)
    if rank == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


def gloo(rank: int, size: int) -> dict[str, float]:
    """Time all_reduce of torch.distributed."""
    import torch
    import torch.distributed as dist

    found = {}
    warm_up(dist.barrier, 500)
    for name, nbytes in SIZES.items():
        x = torch.ones(nbytes // 4)
        found[name] = median_seconds(lambda x=x: dist.all_reduce(x), dist.barrier)
    return found


def ddp(rank: int, size: int) -> dict[str, float]:
    """Time a step of the MLP: whole batch alone, and its half under DistributedDataParallel."""
    import torch
    import torch.distributed as dist
    from torch import nn

    def step_of(model, batch):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        x, y = torch.ones(batch, WIDTHS[0]), torch.zeros(batch, dtype=torch.long)

        def step():
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    def mlp():
        layers = [nn.Linear(a, b) for a, b in pairwise(WIDTHS)]
        return nn.Sequential(*[m for layer in layers for m in (layer, nn.ReLU())][:-1])

    alone = step_of(mlp(), BATCH)
    dist.barrier()
    whole = median_seconds(alone, lambda: None, 9) if rank == 0 else None
    dist.barrier()
    shared = step_of(nn.parallel.DistributedDataParallel(mlp()), BATCH // size)
    return {"one device": whole, "data parallel": median_seconds(shared, dist.barrier, 15)}


def pipelines(rank: int, size: int) -> dict[str, float]:
    """Time the pipelines of torch.distributed.pipelining on the work of `pipelines.py`."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed import pipelining

    from minidist.tools.bench.pipelines import LAYERS, MICRO_BATCHES, PEERS, REPEATS, WIDTH, batch

    x, y = map(torch.from_numpy, batch())
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    own = [m for layer in layers[rank::size] for m in (layer, nn.ReLU())]
    module = nn.Sequential(*(own[:-1] if rank == size - 1 else own))

    found = {}
    for m in MICRO_BATCHES:
        for name, schedule in PEERS.items():
            stage = pipelining.PipelineStage(module, rank, size, torch.device("cpu"))
            schedule = getattr(pipelining, schedule)(stage, m, loss_fn=nn.functional.cross_entropy)

            def step(schedule=schedule):
                if rank == 0:
                    schedule.step(x)
                else:
                    schedule.step(target=y)
                module.zero_grad()

            found[f"{name} {m}"] = median_seconds(step, dist.barrier, REPEATS)
    return found


def eager() -> None:
    """Take each step of `torch_eager.py` once, to check that this PyTorch can."""
    from minidist.tools.bench.torch_eager import STEPS

    print(json.dumps({n: median_seconds(make(), lambda: None, 1) for n, make in STEPS.items()}))


def gpu() -> None:
    """Time the workloads of `gpu.py`, of the sizes in the second argument."""
    import torch

    from minidist.tools.bench import torch_eager
    from minidist.tools.bench.gpu import Sizes, times

    sizes = Sizes(**json.loads(sys.argv[2]))
    works = torch_eager.mlp_step, torch_eager.transformer_step, torch_eager.product
    with torch.device("cuda"):
        print(json.dumps(times(sizes.workloads(*works), torch_eager.TorchClock())))


if __name__ == "__main__":
    alone = {"mpi": mpi, "transport": transport, "numpitron": numpitron, "eager": eager, "gpu": gpu}
    if sys.argv[1] in alone:
        alone[sys.argv[1]]()
    else:
        works = {"gloo": gloo, "ddp": ddp, "pipelines": pipelines}
        _with_gloo(works[sys.argv[1]], int(sys.argv[2]))
