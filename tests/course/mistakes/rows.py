"""The first three labs: rows of mistakes, one in each task, and ways that are right together.

Tasks do not lean on each other here, so a whole row is made at once.
CANARIES    {lab: [{task: (file, the reference's text, the wrong one, what the grader says)}]}
OTHER_WAYS  {lab: [(file, the reference's text, another right one)]}
"""

OPERATORS, TENSOR = "autograd/operators.py", "autograd/tensor.py"
FUNCTIONS, LOSSES, DEFERRED = "autograd/functions.py", "autograd/losses.py", "autograd/deferred.py"
COLLECTIVES = "comm/collectives.py"
DATASETS, NAIVE = "datasets.py", "data_parallel/naive.py"
BUCKETED, ZERO = "data_parallel/bucketed.py", "data_parallel/zero.py"

ALONG_EVERY_PATH = """

def _along_every_path(function, grad):
    inputs, gradients = function.inputs, function.backward(grad)
    for source, dx in zip(inputs, gradients if type(gradients) is tuple else (gradients,)):
        if isinstance(source, Tensor):
            yield source, dx
        elif source is not None and dx is not None:
            dx = dx() if callable(dx) else dx
            if dx.shape != source.result_shape:
                dx = unbroadcast(dx, source.result_shape)
            yield from _along_every_path(source, dx)
"""
RING_OF_WHOLE_ARRAYS = """
    total, passing = x.copy(), x.copy()
    for _ in range(channel.size - 1):
        channel.send(passing, (channel.rank + 1) % channel.size)
        passing = channel.recv((channel.rank - 1) % channel.size)
        combine(total, passing, out=total)
    x[...] = total
    return
"""
STAR = """
    if channel.rank:
        channel.send(x, 0)
        x[...] = channel.recv(0)
        return
    for r in range(1, channel.size):
        combine(x, channel.recv(r), out=x)
    for r in range(1, channel.size):
        channel.send(x, r)
    return
"""
WHOLE_ARRAYS = """
    distance = 1
    while distance < channel.size:
        channel.send(x, channel.rank ^ distance)
        other = channel.recv(channel.rank ^ distance)
        combine(*((other, x) if channel.rank & distance else (x, other)), out=x)
        distance *= 2
    return
"""

CANARIES = {  # lab: rows of {task: (path, right, wrong, what the verdict says)}
    "autograd": [
        {
            "1.1": (OPERATORS, "-da * self.y", "da * self.y", "its sign is missing"),
            "1.2": (
                TENSOR,
                "grad = sum_over(grad, axis=tuple(range(grad.ndim - len(shape))))",
                "grad = grad.mean(axis=tuple(range(grad.ndim - len(shape))))",
                "it is the mean over the repeats, not their sum",
            ),
            "1.3": (
                TENSOR,
                "pending[source] = pending[source] + dx if source in pending else dx",
                "pending[source] = dx",
                "d 0",
            ),
            "1.4": (
                FUNCTIONS,
                "dx = y * (wide - (wide * y).sum(axis=self.axis, keepdims=True))",
                "dx = y * wide",
                "<dY, Y> is missing",
            ),
            "1.5": (FUNCTIONS, "d -= mean_columns(d)", "pass", "mean d is missing"),
            "1.6": (
                LOSSES,
                "dx *= widen(grad) / self.reduction_size",
                "dx *= widen(grad) / len(dx)",
                "rows at hand, not by `reduction_size`",
            ),
            "1.7": (
                DEFERRED,
                "        if others:",
                "        if False:",
                "leaf 0: [234] products were added, not 1: those of all passes are one",
            ),
        },
        {
            "1.1": (
                OPERATORS,
                "(chosen / chosen.sum(axis=self.axis, keepdims=True))",
                "chosen",
                "ties get the whole gradient each; they share it",
            ),
            "1.2": (
                TENSOR,
                "return sum_over(grad, axis=axes, keepdims=True) if axes else grad",
                "return grad",
                r"the result has the shape \[.*\], not \[1, .*, 1\]",
            ),
            "1.3": (TENSOR, "function.__dict__.clear()", "pass", "functions keep arrays, not"),
            "1.4": (
                FUNCTIONS,
                "y = array_module(x).exp(wide - wide.max(axis=self.axis, keepdims=True))",
                "y = array_module(x).exp(wide - wide.max())",
                "row near 1000, one near -1000: .*(is nan|has a NaN)",
            ),
            "1.5": (FUNCTIONS, "d -= dx", "pass", r"n mean\(d n\) is missing"),
            "1.6": (
                LOSSES,
                "rows.max(axis=-1, keepdims=True)",
                "rows.max()",
                "rows near .*: (forward: y 0 is -inf|d0 0 has a NaN)",
            ),
            "1.7": (
                DEFERRED,
                "if self.remaining[self.leaf] == 0:",
                "if self.contribution is None:",
                "its hooks were called",
            ),
        },
        {
            "1.1": (
                OPERATORS,
                "xp.add.at(da, self.index, grad)",
                "da[self.index] = grad",
                "an element that is taken twice gets the sum",
            ),
            "1.2": (
                TENSOR,
                "if n == 1 and grad.shape[i] != 1)",
                "if n == 1 and grad.shape[i] > 1)",
                r"from \[0, .\] to \[1, .\]: .* shape \[0, .\]",
            ),
            "1.3": (
                TENSOR,
                "    pending = {root.creator: grad}\n",
                "    yield from _along_every_path(root.creator, grad)\n    return\n"
                "    pending = {root.creator: grad}\n",
                "backward was called 4095 times for 12 functions",
            ),
            "1.4": (
                FUNCTIONS,
                "(wide * y).sum(axis=self.axis, keepdims=True)",
                "(wide * y).sum(axis=-1, keepdims=True)",
                "<dY, Y> is summed over another axis",
            ),
            "1.5": (
                FUNCTIONS,
                "d = wide * gain\n",
                "d = wide * 1\n",
                "d = dY g: the gain is missing",
            ),
            "1.6": (
                LOSSES,
                "dx *= widen(grad) / self.reduction_size",
                "dx *= 1 / self.reduction_size",
                "the incoming dL is missing",
            ),
            "1.7": (
                DEFERRED,
                "matmul(self.a.T, self.b, out=out)",
                "matmul(self.a.T, self.b)",
                "called with out=, it returns another array than out",
            ),
        },
    ],
    "collectives": [
        {
            "2.1": (
                COLLECTIVES,
                "return pieces[root].copy()",
                "return pieces[root]",
                "an array that the caller still owns",
            ),
            "2.2": (
                COLLECTIVES,
                "        channel.send(pieces[(r + step) % N], to=(r + step) % N)\n",
                "        to = step - 1 if step <= r else step\n"
                "        channel.send(pieces[to], to=to)\n",
                r"in step 1 ranks \[1, .*\] all send to rank 0",
            ),
            "2.3": (
                COLLECTIVES,
                "    N, r = channel.size, channel.rank\n    ends = split_ends(x.size, N)\n\n",
                RING_OF_WHOLE_ARRAYS + "    N, r, ends = 1, 0, []\n\n",
                "rank 1 has other bits|every rank's whole array goes to every other",
            ),
            "2.4": (
                COLLECTIVES,
                "    N, r, distance = channel.size, channel.rank, 1\n",
                STAR + "    N, r, distance = 1, 0, 1\n",
                r"it took \d+ steps, not 6",
            ),
            "2.5": (
                COLLECTIVES,
                "    ends, low, high, distance, halves =",
                WHOLE_ARRAYS + "    ends, low, high, distance, halves =",
                r"all ranks together sent \d+ bytes, not 2 \(N - 1\) S = ",
            ),
        },
        {
            "2.1": (
                COLLECTIVES,
                "        channel.send(x, to=root)\n        return None",
                "        channel.send(x, to=root)\n        return []",
                "to_root: rank . gets a list; root is",
            ),
            "2.2": (
                COLLECTIVES,
                "[pieces[r].copy() if rank == r else received[rank] for rank in range(N)]",
                "[pieces[r].copy(), *received.values()]",
                "at place .*: not in rank order",
            ),
            "2.3": (
                COLLECTIVES,
                "channel.send(chunk(r - step + 1), to=(r + 1) % N)",
                "channel.send(chunk(r - step), to=(r + 1) % N)",
                r"\(chunks .* of 3 are wrong\)",
            ),
            "2.4": (
                COLLECTIVES,
                "        if r + distance < N:\n            channel.send",
                "        if True:\n            channel.send",
                "rank . failed",
            ),
            "2.5": (
                COLLECTIVES,
                "    if N & (N - 1):",
                "    if N == 3:",
                "failed|got no ValueError",
            ),
        },
        {
            "2.1": (
                COLLECTIVES,
                "    total, *others = pieces\n",
                "    *others, total = pieces\n    others.reverse()\n",
                "the result is another array than the first piece",
            ),
            "2.2": (
                COLLECTIVES,
                "pieces[r].copy() if rank == r",
                "pieces[r] if rank == r",
                "own piece is not a copy",
            ),
            "2.3": (
                COLLECTIVES,
                "combine(channel.recv((r - 1) % N), mine, out=mine)",
                "mine += channel.recv((r - 1) % N)",
                r"it is the sum; `combine` was np\.m",
            ),
            "2.4": (
                COLLECTIVES,
                "    while distance > 1:\n        distance //= 2\n        if r + distance < N:",
                "    for distance in [d for d in (1, 2, 4, 8) if d < distance]:\n"
                "        if r + distance < N:",
                "steps, not",
            ),
            "2.5": (
                COLLECTIVES,
                "        chunks(give)[...] = channel.recv(r ^ distance)",
                "        channel.recv(r ^ distance)",
                r"\(chunks .* are wrong\)",
            ),
        },
    ],
    "data_parallel": [
        {
            "3.1": (
                DATASETS,
                "np.array_split(examples, size)[rank]",
                "examples[rank::size]",
                "neighbours stay together",
            ),
            "3.2": (
                NAIVE,
                "p.grad = group.all_reduce(grad, label=name)",
                "p.grad = group.all_reduce(grad, label=name) / group.size",
                "it is the mean over ranks",
            ),
            "3.3": (BUCKETED, "in reversed(parameters)", "in parameters", "keep their own order"),
            "3.4": (
                BUCKETED,
                "        self._launch_until(stop)\n",
                "        bucket = self.bucket_of[p]\n"
                "        if self.missing[bucket] == 0:\n"
                "            self.orders.put(bucket)\n",
                "every rank launches bucket 0 first",
            ),
            "3.5": (
                ZERO,
                "s.parameter.accumulate(piece)",
                "s.parameter.accumulate(piece / self.group.size)",
                "it is the mean",
            ),
            "3.6": (
                ZERO,
                "return float(self.group.all_reduce(np.array(own)))",
                "return own",
                "the gradient's length over all ranks: norms",
            ),
            "3.7": (
                ZERO,
                "        if self.wait() != k:\n            self._gather(k)",
                "        self.wait()\n        self._gather(k)",
                r"not \d+ = \(N - 1\) P: each layer is gathered once",
            ),
        },
        {
            "3.1": (
                DATASETS,
                'f"epoch {number}")',
                'f"epoch {number + self.rank}")',
                r"over all ranks \d+ come twice, \d+ never",
            ),
            "3.2": (
                NAIVE,
                "            grad = p.xp.zeros_like(p.data) if p.grad is None else p.grad\n",
                "            if (grad := p.grad) is None:\n                continue\n",
                "Deadlock",
            ),
            "3.3": (BUCKETED, "room -= p.data.nbytes", "room -= 0", "bytes, .* is the most"),
            "3.4": (
                BUCKETED,
                "        if self.missing is None:\n            return\n",
                "        if self.missing is None:\n"
                "            self.missing = [len(b) for b in self.buckets]\n",
                "while `missing` is None",
            ),
            "3.5": (
                ZERO,
                "                p.grad = None\n            piece",
                "            piece",
                "rank 0 still has . whole gradients",
            ),
            "3.6": (
                ZERO,
                "        if self.stage < 3:\n            for k, s",
                "        if False:\n            for k, s",
                "the other ranks' parts are from before",
            ),
            "3.7": (ZERO, "self.coming = then\n", "pass\n", "no layer is coming, not layer 1"),
        },
        {
            "3.1": (DATASETS, "], len(batch)", "], len(mine)", "total ., not ., of all ranks"),
            "3.2": (
                NAIVE,
                "p.grad = group.all_reduce(grad, label=name)",
                "p.grad = group.all_gather(grad[None], label=name).sum(0)",
                r"all ranks together sent \d+ bytes, not \d+ = 2 \(N - 1\) S",
            ),
            "3.3": (
                BUCKETED,
                "if not buckets or p.data.nbytes > room:",
                "if True:",
                "fill each before you begin another",
            ),
            "3.4": (
                BUCKETED,
                "p.grad_buffer[...] = 0 if p.grad is None else p.grad",
                "p.grad_buffer[...] = 0",
                "layers.0.weight is wrong",
            ),
            "3.5": (
                ZERO,
                "place[...] = 0 if p.grad is None else p.grad",
                "place[...] = place if p.grad is None else p.grad",
                r"the gradient of its shard of layer .\[.\] is .e[+]06, not",
            ),
            "3.6": (
                ZERO,
                "        optimizer.step()\n        optimizer.zero_grad()",
                "        optimizer.step()",
                "rank 0 keeps the gradients|norms",
            ),
            "3.7": (
                ZERO,
                "        if self.wait() != k:\n            self._gather(k)",
                "        if self.wait() is None:\n            self._gather(k)",
                r"after need\(0, then=1\): they",
            ),
        },
    ],
}

ANOTHER_TREE = """
    d = 1
    while 2 * d < channel.size:
        d *= 2
    path = []
    while d:
        if channel.rank < 2 * d:
            path.append(d)
        d //= 2
    for d in path if channel.size > 1 else []:
        if channel.rank >= d:
            channel.send(x, channel.rank - d)
        elif channel.rank + d < channel.size:
            combine(x, channel.recv(channel.rank + d), out=x)
    for d in reversed(path) if channel.size > 1 else []:
        if channel.rank >= d:
            x[...] = channel.recv(channel.rank - d)
        elif channel.rank + d < channel.size:
            channel.send(x, channel.rank + d)
    return
"""
ONE_MESSAGE = """
    import numpy as np
    wanted = [p for p in model.parameters() if p.requires_grad]
    whole = [np.zeros(p.shape) if p.grad is None else p.grad for p in wanted]
    flat = group.all_reduce(np.concatenate([g.reshape(-1) for g in whole]))
    for p in wanted:
        p.grad, flat = flat[: p.size].reshape(p.shape), flat[p.size :]
    return
"""
OTHER_WAYS = {  # (path, here, there): right as well, in another order
    "collectives": [
        (COLLECTIVES, "chunk(r - step", "chunk(r + 3 - step"),
        (
            COLLECTIVES,
            "    N, r, distance = channel",
            ANOTHER_TREE + "    N, r, distance = channel",
        ),
        (COLLECTIVES, "keep, give = (upper, lower) if r", "keep, give = (upper, lower) if ~r"),
        (COLLECTIVES, "for step in range(1, N)", "for step in range(1 - N, 0)"),
    ],
    "data_parallel": [
        (NAIVE, "    for name, p in", ONE_MESSAGE + "    for name, p in"),
    ],
}
