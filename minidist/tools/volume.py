"""What strategies move and hold, as closed forms: bytes, exactly, each with its domain.

Letters: N ranks, r one of them, n elements of `itemsize` bytes.
"""

from math import log2

from minidist.comm.collectives import split_ends, split_sizes


def all_reduce_bytes(algorithm: str | None, n: int, itemsize: int, N: int) -> list[int]:
    """Return the payload bytes that others take from each rank in one all_reduce of n elements.

    None: what the others reduce of this rank's array, n - s_r, and N - 1 times its slice s_r.
    "ring": every chunk but number r + 1, and then every chunk but number r + 2. "tree": n from each
    rank but 0 on the way up; n to each child on the way down. "halving_doubling" (N a power of
    two): at each distance the half it gives, then the one it keeps. Where N divides n, all but the
    tree give 2 (N - 1) / N n.
    """
    sizes = split_sizes(n, N)
    if algorithm is None:
        elements = [n - own + (N - 1) * own for own in sizes]
    elif algorithm == "ring":
        elements = [2 * n - sizes[(r + 1) % N] - sizes[(r + 2) % N] for r in range(N)]
        elements = elements if N > 1 else [0]
    elif algorithm == "tree":
        elements = [n * (_children(r, N) + (r > 0)) for r in range(N)]
    elif algorithm == "halving_doubling":
        elements = [_halving_doubling(n, N, r) for r in range(N)]
    else:
        raise ValueError(f"no closed form for the algorithm {algorithm!r}")
    return [itemsize * count for count in elements]


# Bytes per parameter in float32 with Adam: the convention of `zero_bytes_held`. (Rajbhandari et al.
# count 16 as well, of mixed precision: weights 2, gradients 2, and 12 that the optimizer keeps.)
FP32_ADAM = {"parameters": 4, "gradients": 4, "optimizer state": 8}


def zero_bytes_held(stage: int, sizes: list[int], N: int, r: int) -> dict[str, int]:
    """Return the bytes that rank r holds of layers with so many elements each, by `FP32_ADAM`.

    Stage 0 is plain data parallelism: 16 bytes per parameter. With P parameters in all, of which s
    are rank r's, and b in the largest layer:

        stage   parameters    gradients    optimizer state
        0       4 P           4 P          8 P
        1       4 P           4 P          8 s
        2       4 P           4 (s + b)    8 s
        3       4 (s + 2 b)   4 (s + b)    8 s

    Where no layer is tied to another one; frozen parameters do not count.
    """
    P, b = sum(sizes), max(sizes)
    s = sum(split_sizes(n, N)[r] for n in sizes)
    elements = {
        "parameters": s + 2 * b if stage == 3 else P,
        "gradients": s + b if stage >= 2 else P,
        "optimizer state": s if stage >= 1 else P,
    }
    return {what: FP32_ADAM[what] * n for what, n in elements.items()}


def zero_bytes_moved(
    stage: int, sizes: list[int], itemsize: int, N: int, r: int, micro_batches: int = 1
) -> int:
    """Return the payload bytes that others take from rank r in one step of ZeRO.

    A layer of n elements, s of them r's: n - s in a reduce_scatter, (N - 1) s in an all_gather.
    Stage 1 does one of each per step; stage 2 scatters, stage 3 scatters once and gathers twice,
    per micro-batch. Where N divides all n: (N - 1)/N P times 2, 1 + M, or 3 M.
    """
    P, s = sum(sizes), sum(split_sizes(n, N)[r] for n in sizes)
    scatters = {1: 1, 2: micro_batches, 3: micro_batches}[stage]
    gathers = {1: 1, 2: 1, 3: 2 * micro_batches}[stage]
    return itemsize * (scatters * (P - s) + gathers * (N - 1) * s)


def _children(r: int, N: int) -> int:
    """Return how many ranks hang below r in the binomial tree.

    They are r + 1, r + 2, r + 4, ... up to r's own lowest bit, as far as they exist.
    """
    distances = [1 << bit for bit in range(N.bit_length())]
    lowest = r & -r if r else N
    return sum(d < lowest and r + d < N for d in distances)


def _halving_doubling(n: int, N: int, r: int) -> int:
    ends, low, high, total = split_ends(n, N), 0, N, 0
    for bit in reversed(range(round(log2(N)))):
        middle = (low + high) // 2
        total += ends[high] - ends[low]  # one half down, the other half up
        low, high = (middle, high) if r & (1 << bit) else (low, middle)
    return total


def block_bytes(
    B: int, T: int, C: int, itemsize: int, N: int, sequence: bool = False
) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """Return {operation: payload bytes that others take from each rank}, forward and backward.

    Of one block of a split Transformer on a batch X[B, T, C]. By matrices: two all_reduces each
    way. With the sequence split, N dividing T: two all_gathers and two reduce_scatters each way,
    and in backward the inputs of two products are gathered once more.
    """
    n = B * T * C
    if not sequence:
        way = {"all_reduce": [2 * own for own in all_reduce_bytes(None, n, itemsize, N)]}
        return way, way
    part = [(N - 1) * n // N * itemsize] * N  # N - 1 others take n/N; or all but one's own n/N
    forward = {"all_gather": [2 * p for p in part], "reduce_scatter": [2 * p for p in part]}
    return forward, forward | {"all_gather": [4 * p for p in part]}


def block_parameters(C: int, N: int) -> int:
    """Return how many parameters of a block of width C, F = 4 C, each of N ranks holds.

    QKV C 3C + 3C, output C C + C, expand C 4C + 4C, contract 4C C + C, two norms of 2C: of these
    12 C^2 + 7 C are split, and every rank has the biases of output and contract, and the norms.
    Gradients are as many; Adam's averages twice as many.
    """
    return (12 * C * C + 7 * C) // N + 6 * C


def block_activation_bytes(
    B: int,
    T: int,
    C: int,
    H: int,
    itemsize: int,
    N: int = 1,
    sequence: bool = False,
    dropout: bool = True,
) -> int:
    """Return the bytes that a block's forward leaves on each of N ranks for its backward.

    In numbers, with F = 4 C and N dividing C, H and, with the sequence split, T:

        on every rank, or split by sequence
            two norms: n[B, T, C] and r[B, T] each; the inputs of QKV and expand     4 BTC + 2 BT
        split by heads, or columns
            Q, K, V; probabilities P[B, H, T, T]; the input of the output product    4 BTC + B H T T
            gelu: its input and its tanh [B, T, F]; the input of contract           12 BTC

    and two masks of one byte per element of X, if there is dropout. For float32 and float64: what
    float16 computes in float32 it also keeps so.

    Against Korthikanti et al. 2022, section 4 (`korthikanti_bytes`), at their 2 bytes a number, we
    keep gelu's tanh (8 BTC bytes) and the norms' r (4 BT) besides, and do not drop out
    probabilities, which takes a mask and a dropped-out copy: 3 B H T T. They keep a norm's input
    where we keep n, of the same size.
    """
    X, P = B * T * C, B * H * T * T
    outside = (4 * X + 2 * B * T) * itemsize + (2 * X if dropout else 0)
    inside = (16 * X + P) * itemsize
    return outside // (N if sequence else 1) + inside // N


def korthikanti_bytes(B: int, T: int, C: int, H: int, N: int = 1, sequence: bool = False) -> float:
    """Return their bytes per layer and rank: s = T, b = B, h = C, a = H, t = N.

    sbh (34 + 5 as/h) on one device (section 4.1), sbh (10 + 24/t + 5 as/(ht)) split by matrices
    (4.2.1), sbh/t (34 + 5 as/h) with the sequence split as well (4.2.2).
    """
    return B * T * C * (10 / (N if sequence else 1) + 24 / N + 5 * H * T / (C * N))


def parameter_server_bytes(
    n: int, itemsize: int, servers: int, steps: list[int], n_fetch: int = 1, n_push: int = 1
) -> int:
    """Return the bytes that parameter servers and workers send, all together.

    steps  minibatches per worker; a worker pulls before every n_fetch-th and pushes after every
           n_push-th, from the first one on, and with its last word what is left

    n elements per pull and per push; to each server 16 bytes per request, and 16 per gradient that
    a push is the sum of; from each server 8 per pull for the version. For dense pushes without a
    quorum.
    """
    pulls = sum(-(-count // n_fetch) for count in steps)
    pushes = sum(-(-count // n_push) for count in steps)
    rests = sum(count > 0 and (count - 1) % n_push > 0 for count in steps)
    heads = 16 * servers * (pulls + pushes + len(steps) + sum(steps))
    return heads + 8 * servers * pulls + itemsize * n * (pulls + pushes + rests)
