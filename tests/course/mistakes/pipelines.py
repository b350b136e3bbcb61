"""Wrong schedules, transfers and versions of weights."""

GPIPE, ONE = "pipeline_parallel/gpipe.py", "pipeline_parallel/one_f_one_b.py"
TRANSFERS, EXECUTOR = "pipeline_parallel/communication.py", "pipeline_parallel/executor.py"
INTERLEAVED, ZERO = "pipeline_parallel/interleaved.py", "pipeline_parallel/zero_bubble.py"
VERSIONS = "pipeline_parallel/weight_versions.py"

NEEDS = {}

MISTAKES = [
    (
        "4.1",
        GPIPE,
        "from map(Forward, range(m))\n    yield from map(Backward, reversed(range(m)))",
        "from (kind(i) for i in range(m) for kind in (Forward, Backward))",
        "only one rank works at any time, as in layer_split",
    ),
    ("4.1", GPIPE, "Backward, reversed(range(m))", "Backward, range(m - 1)", "missing: B, or I"),
    (
        "4.1",
        GPIPE,
        "yield from map(Forward, range(m))\n    yield from map(Backward, reversed(range(m)))",
        "from minidist.pipeline_parallel.one_f_one_b import one_f_one_b\n\n"
        "    yield from one_f_one_b(rank, p, m)",
        " at its peak, not ",
    ),
    ("4.1", GPIPE, "reversed(range(m))", "range(m) if rank else reversed(range(m))", " idles "),
    ("4.2", ONE, "min(p - 1 - rank, m)", "min(p - rank, m)", "one forward too early"),
    ("4.2", ONE, "min(p - 1 - rank, m)", "m", " = min(m, p - r): all of them"),
    ("4.2", ONE, "min(p - 1 - rank, m)", "p - 1 - rank", "is foreign"),
    ("4.2", ONE, "min(p - 1 - rank, m)", "0", "only one rank works at any time"),
    ("4.3", TRANSFERS, "*holder[stage, m]", "(rank + stage - k) % len(programs), c", "needs"),
    ("4.3", TRANSFERS, "if rendezvous_safe else _one_by_one", "if False else _one_by_one", ""),
    (
        "4.3",
        TRANSFERS,
        "if rendezvous_safe:\n                    result[send.peer]",
        "if True:\n                    result[send.peer]",
        "comes twice",
    ),
    ("4.3", TRANSFERS, "if passes_backward(action)", "if k > 0 and passes_backward(action)", "<B"),
    ("4.3", TRANSFERS, "if communicates(programs):", "if False:", "not to be added again"),
    (
        "4.4",
        EXECUTOR,
        "chunk = transfer.chunk if receives else transfer.peer_chunk",
        "chunk = transfer.chunk",
        "are two ends of one transfer",
    ),
    ("4.4", EXECUTOR, "(chunk << 1) + gradient", "(chunk << 1)", "have one tag"),
    ("4.4", EXECUTOR, "(transfer.micro_batch << 16) +", "", "have one tag"),
    (
        "4.4",
        EXECUTOR,
        "[a.micro_batch for a in run]",
        "[i]",
        "layers.",
    ),
    ("4.4", EXECUTOR, "stage.update(i)", "pass", "has updated with micro-batches []"),
    (
        "4.4",
        EXECUTOR,
        "group.send(stage.output(i), peer, tag(action))",
        "[group.send(y, peer, tag(action)) for y in [stage.output(i)] for _ in range(1 + (i > 0))]",
        "nobody",
    ),
    ("4.5", INTERLEAVED, "2 * (p - 1 - rank)", "2 * rank", "deadlock"),
    ("4.5", INTERLEAVED, "min(total, 2 * (p - 1 - rank) + (chunks - 1) * p)", "total", "not"),
    ("4.5", INTERLEAVED, "chunks - 1 - chunk", "chunk", "deadlock"),
    ("4.5", INTERLEAVED, "if m % p:", "if False:", "a ValueError is due"),
    ("4.6", ZERO, "late=rank)", "late=0)", "all W come right after their I"),
    ("4.6", ZERO, "ahead=p - rank, late=rank)", "ahead=p, late=rank)", " idles "),
    (
        "4.6",
        ZERO,
        "ahead=2 * (p - rank) - 1, late=2 * rank",
        "ahead=p - rank, late=rank",
        " idles ",
    ),
    ("4.6", ZERO, "range(max(0, m - late), m)", "range(m - late, m)", "foreign"),
    ("4.7", VERSIONS, "max(0, b - (p - 1))", "b - (p - 1)", "the newest version 0, p = "),
    ("4.7", VERSIONS, "max(0, b // every - 1)", "b // every", "version 1, not 0"),
    (
        "4.7",
        VERSIONS,
        'self._use("B", b, self.in_flight.pop(b))',
        'self._use("B", b, self.newest)\n        self.in_flight.pop(b)',
        "in B1 the weights are version 1, not version 0: backward needs what",
    ),
    (
        "4.7",
        VERSIONS,
        "self.newest = self.newest.copy()",
        "pass",
        "an update has to leave them alone",
    ),
    ("4.7", VERSIONS, "n >= version}", "n >= 0}", "buffers were kept at once, not"),
    (
        "4.7",
        VERSIONS,
        "self.first + self.choose(b, self.version - self.first)",
        "self.choose(b, self.version)",
        "",
    ),
]

OTHERS = [
    ("4.1", GPIPE, "Backward, reversed(range(m))", "Backward, range(m)"),
    (
        "4.2",
        ONE,
        "yield from map(Forward, range(ahead))",
        "yield from [Forward(i) for i in range(ahead)]",
    ),
    (
        "4.4",
        EXECUTOR,
        "(transfer.micro_batch << 16) + (chunk << 1) + gradient",
        "transfer.micro_batch + 1000 * chunk + 1_000_000 * gradient",
    ),
    ("4.5", INTERLEAVED, "2 * (p - 1 - rank)", "(p - 1 - rank)"),
    ("4.7", VERSIONS, "self.newest = self.newest.copy()", "self.newest = self.newest + 0"),
]
