"""What a rank holds and sends under ZeRO, by stage.  N ranks, r one of them.

Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models (SC 2020),
section 3. There are P parameters in all; s of them are rank r's, and b are in the largest layer:

    stage   parameters   gradients   optimizer       scatters   gathers     for m micro-batches
    0       P            P           P               1          1, of dW
    1       P            P           s               1          1
    2       P            s + b       s               m          1
    3       s + 2 b      s + b       s               m          2 m

b is for buffers: a layer's gradients before they are scattered; its gathered weights, and those of
the next layer. The paper counts no buffers, b = 0. Stage 0 is plain data parallelism.
"""

from typing import TypeVar

from minidist.pieces import split_sizes

BYTES = {  # of parameters, gradients and optimizer state with Adam: (precision, bytes in all)
    ("float32", 16): (4, 4, 8),
    ("mixed", 16): (2, 2, 12),
    ("mixed", 18): (2, 4, 12),  # Megatron-LM's: gradients are summed in float32
    ("stochastic", 8): (2, 2, 4),  # no copies: weights and moments are rounded at random
}
N = TypeVar("N", int, float)
FP32_ADAM = dict(
    zip(("parameters", "gradients", "optimizer state"), BYTES["float32", 16], strict=True)
)


def zero_elements(stage: int, P: N, s: N, b: N) -> tuple[N, N, N]:
    """Return the parameters, gradients and optimizer's parameters that a rank holds."""
    return (
        s + 2 * b if stage == 3 else P,
        s + b if stage >= 2 else P,
        s if stage >= 1 else P,
    )


def zero_passes(stage: int, m: int) -> tuple[int, int]:
    """Return how often a step scatters a layer's gradients, and how often it gathers its weights.

    In stage 0 both together are the all_reduce of the gradients.
    """
    return (m, 2 * m) if stage == 3 else (m if stage == 2 else 1, 1)


def zero_bytes_held(
    stage: int, sizes: list[int], N: int, r: int, each: tuple[int, int, int] = (4, 4, 8)
) -> dict[str, int]:
    """Return the bytes that rank r holds of layers with these numbers of elements.

    each  bytes per parameter, as in `BYTES`: by default those of float32

    This holds if no layer is tied to another one; frozen parameters do not count.
    """
    s = sum(split_sizes(n, N)[r] for n in sizes)
    elements = zero_elements(stage, sum(sizes), s, max(sizes))
    return {kind: n * w for kind, n, w in zip(FP32_ADAM, elements, each, strict=True)}


def zero_bytes_moved(
    stage: int, sizes: list[int], itemsize: int, N: int, r: int, micro_batches: int = 1
) -> int:
    """Return the payload bytes that rank r sends in one step of ZeRO, stages 1 to 3.

    A layer of n elements, s of them r's: n - s in a reduce_scatter, (N - 1) s in an all_gather.
    Where N divides all n: (N - 1)/N P times 2, 1 + m, or 3 m.
    """
    P, s = sum(sizes), sum(split_sizes(n, N)[r] for n in sizes)
    scatters, gathers = zero_passes(stage, micro_batches)
    return itemsize * (scatters * (P - s) + gathers * (N - 1) * s)
