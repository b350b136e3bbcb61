"""The times of PyTorch: its steps, gloo, DDP and its pipelines (needs the extra `bench`).

    python -m minidist.observe.bench.torch_peers steps cpu '{"MLP": ["mlp_step", {}]}'   (or cuda)
    python -m minidist.observe.bench.torch_peers gloo 2    (starts two processes; or ddp, pipelines)

Prints one JSON object: {workload: median seconds}. One thread per process.
"""

import json
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from itertools import product as pairs

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import DeviceType
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile

from minidist import nn as ours
from minidist.events import Clock
from minidist.observe.bench import comm
from minidist.observe.bench import pipelines as work
from minidist.observe.bench.steps import chain_of, makers, training_step
from minidist.observe.bench.table import Step, Times, times_of
from minidist.observe.step_parts import ProcessClock
from minidist.verify.interop.twins import twin

torch.set_num_threads(1)


def steps(device: str, works: str) -> Times:
    """Time the workloads of `steps.py` on a device.

    Each is as in PyTorch eager; with the argument "compiled" under `torch.compile`.
    """

    def on_device(prepare: Callable[[], Step]) -> Step:
        with torch.device(device):
            return prepare()

    made = makers(sys.modules[__name__], json.loads(works))
    ways = {name: partial(on_device, prepare) for name, prepare in made.items()}
    return times_of(ways, clock=ProcessClock if device == "cpu" else TorchClock)


def mlp(widths) -> nn.Sequential:
    layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def mlp_step(
    widths=(784, 512, 512, 10), rows=128, wrap: Callable | None = None, compiled=False
) -> Step:
    images, labels = torch.randn(rows, widths[0]), torch.randint(0, widths[-1], (rows,))
    model = wrap(mlp(widths)) if wrap else mlp(widths)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return _step(model, optimizer, images, labels, compiled)


def transformer_step(
    vocab=96, width=128, heads=4, depth=4, context=64, batch=16, compiled=False
) -> Step:
    tokens = torch.randint(0, vocab, (2, batch, context))
    model = twin(ours.Transformer(vocab, width, heads, depth, context))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return _step(model, optimizer, tokens[0], tokens[1], compiled)


def _step(model, optimizer, inputs, targets, compiled) -> Step:
    def loss():
        return cross_entropy(model(inputs).flatten(0, -2), targets.flatten())

    return training_step(torch.compile(loss) if compiled else loss, optimizer)


def chain_step(operations=1000) -> Step:
    return chain_of(torch.ones(4, requires_grad=True), operations)


def convolution_step(images=(32, 16, 28, 28), filters=32) -> Step:
    x, layer = torch.randn(images), nn.Conv2d(images[1], filters, 3, padding=1)
    grad = torch.ones(images[0], filters, *images[2:])

    def step():
        layer(x.detach().requires_grad_()).backward(grad)
        layer.zero_grad()

    return step


def product(size: int, dtype: str) -> Step:
    a, b = torch.rand(2, size, size, dtype=getattr(torch, dtype))
    return partial(torch.matmul, a, b)


class TorchClock(Clock):
    """The clock of PyTorch's current GPU; see backend.DeviceClock."""

    def __init__(self):
        self.first = self.now()

    def now(self):
        moment = torch.cuda.Event(enable_timing=True)
        moment.record()
        return moment

    def seconds(self, moment):
        moment.synchronize()
        return self.first.elapsed_time(moment) / 1e3


def profiled(step: Step) -> list[tuple[str, bool]]:
    """Return (name, whether it is work of the GPU) of all that a step does, and one last wait.

    The profiler reads CUDA's own tracing, which sees the work of other libraries, too.
    """
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    return [(event.name, event.device_type == DeviceType.CUDA) for event in seen.events()]


def gloo(rank: int, size: int) -> Times:
    """Time all_reduce of torch.distributed."""

    def in_place(elements: int) -> Step:
        return partial(dist.all_reduce, torch.full((elements,), 0.0))

    return comm.times_of_sizes(dist.barrier, {"": in_place})


def ddp(rank: int, size: int) -> Times:
    """Time a step of the MLP: whole batch alone, and its part under DistributedDataParallel."""
    alone = partial(mlp_step, comm.WIDTHS, comm.BATCH)
    one_device = times_of({"one device": alone}) if rank == 0 else {}
    dist.barrier()
    wrap = nn.parallel.DistributedDataParallel
    shared = partial(mlp_step, comm.WIDTHS, comm.BATCH // size, wrap)
    return one_device | times_of({"data parallel": shared}, dist.barrier)


def pipelines(rank: int, size: int) -> Times:
    """Time the pipelines of torch.distributed.pipelining on the work of `pipelines.py`."""
    from torch.distributed import pipelining

    x, y = map(torch.from_numpy, work.batch())
    cut = 2 * work.LAYERS // size
    module = mlp([work.WIDTH] * (work.LAYERS + 1))[rank * cut : (rank + 1) * cut]

    def prepared(schedule: str, m: int) -> Step:
        stage = pipelining.PipelineStage(module, rank, size, torch.device("cpu"))
        made = getattr(pipelining, schedule)(stage, m, loss_fn=cross_entropy)

        def step() -> None:
            made.step(x) if rank == 0 else made.step(target=y)
            module.zero_grad()

        return step

    works = {
        f"{name}, m = {m}": partial(prepared, schedule, m)
        for m, (name, schedule) in pairs(work.MICRO_BATCHES, work.PEERS.items())
    }
    return times_of(works, dist.barrier)


def on_gloo(rank: int, workload: str, size: int, store: str) -> None:
    """Run a workload in one of `size` processes that share a gloo group."""
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    times = {"gloo": gloo, "ddp": ddp, "pipelines": pipelines}[workload](rank, size)
    if rank == 0:
        print(json.dumps(times), flush=True)
    dist.destroy_process_group()


def main(workload: str, *arguments: str) -> None:
    if workload == "steps":
        print(json.dumps(steps(*arguments)))
        return
    size = int(arguments[0])
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(on_gloo, (workload, size, f"file://{folder}/store"), size)


if __name__ == "__main__":
    main(*sys.argv[1:])
