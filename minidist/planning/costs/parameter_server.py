"""What parameter servers and their workers move and hold.  The first ranks serve."""

from dataclasses import replace

import numpy as np

from minidist.planning.costs.cost import Cost, Workload, cost_of, positions_of, whole_layers


def clocks_bytes(case: Workload, servers: int, steps: list[int], **every: int) -> int:
    """Return `parameter_server_bytes` for the case's parameters that are not frozen."""
    every_one = case.model.parameters()
    n = sum(p.size for p in every_one if p.requires_grad)
    return parameter_server_bytes(n, every_one[0].dtype.itemsize, servers, steps, **every)


def parameter_server_costs(case: Workload, N: int, servers: int) -> list[Cost]:
    """A server has model and gradient, and 1 + 1 + 2 for its slice; a worker has a push buffer."""
    own, positions = whole_layers(case), positions_of(case)
    P = sum(layer.parameters for layer in own)
    slices = [len(part) for part in np.array_split(np.arange(P), servers)]
    parts = np.array_split(np.arange(len(case.inputs)), N - servers)
    serve = [cost_of(own, 0, 0, (P + s, P + s, 2 * s)) for s in slices]
    return [replace(cost, layers=0) for cost in serve] + [
        cost_of(own, len(part), positions, (P, 2 * P, 0)) for part in parts
    ]


def parameter_server_bytes(
    n: int, itemsize: int, servers: int, steps: list[int], n_fetch: int = 1, n_push: int = 1
) -> int:
    """Return the bytes that parameter servers and workers send, all together.

    steps  minibatches per worker; a worker pulls before every n_fetch-th and pushes after every
           n_push-th, from the first one on; its last message pushes what is left

    n elements per pull and per push; to each server 16 bytes per request, and 16 per gradient in a
    push; from each server 8 per pull for the version. For dense pushes without a quorum.
    """
    pulls = sum(-(-count // n_fetch) for count in steps)
    pushes = sum(-(-count // n_push) for count in steps)
    rests = sum(count > 0 and (count - 1) % n_push > 0 for count in steps)
    heads = 16 * servers * (pulls + pushes + len(steps) + sum(steps))
    return heads + 8 * servers * pulls + itemsize * n * (pulls + pushes + rests)
