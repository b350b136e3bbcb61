"""Multi-head attention to the same sequence or another one (Vaswani et al. 2017, section 3.2).

Grouped queries (Ainslie et al., GQA, 2023, section 2.2): several query heads read one head of keys
and values. Letters: H query heads, K heads of keys and values, each read by G = H/K query heads; D
head width. Query head h reads head h // G. K = H is the attention of Vaswani et al., K = 1
multi-query attention (Shazeer 2019). Keys and values have K/H of the parameters, of the cache and
of the bytes between ranks that hold parts of the sequence.
"""

from minidist.autograd import Tensor, functions
from minidist.autograd.attention import document_attention, padded_attention
from minidist.backend import Array
from minidist.errors import WrongInput, check_sizes
from minidist.nn.linear import Linear
from minidist.nn.module import Module
from minidist.nn.rotary import check_theta, rotate
from minidist.rng import Randomness


class CausalSelfAttention(Module):
    """Y[B, T, C] = concat over heads of softmax(Q K^T / sqrt D) V, times W_o;  C = H D.

    `qkv` makes queries, keys and values of all heads in one product: its 3C columns are [3, H, D].
    attend  (QKV[3, B, H, T, D], randomness) -> O[B, H, T, D]

    >>> nn.CausalSelfAttention(8, heads=2, dtype="float64")(Tensor(np.ones((5, 3, 8)))).shape
    (5, 3, 8)
    """

    def __init__(self, width: int, heads: int, *, name="attention", seed=0, dtype="float32"):
        check_heads(width, heads)
        self.heads, self.attend = heads, attend_to_all
        self.qkv = Linear(width, 3 * width, name=f"{name}.qkv", seed=seed, dtype=dtype)
        self.output = Linear(width, width, name=f"{name}.output", seed=seed, dtype=dtype)

    def forward(self, x: Tensor, randomness: Randomness | None = None) -> Tensor:
        B, T, C = x.shape
        qkv = self.qkv(x).reshape(B, T, 3, self.heads, C // self.heads)
        mixed = self.attend(qkv.transpose(2, 0, 3, 1, 4), randomness)  # [B, H, T, D]
        return self.output(mixed.transpose(0, 2, 1, 3).reshape(B, T, C))


class PaddedAttention(Module):
    """Y[B, T, C] = concat over heads of softmax(Q K^T / sqrt D) V, times W_o; padding is hidden.

    Q is a product of X[B, T, C]; K and V are one product of a memory M[B, S, C], whose 2C columns
    are [2, H, D]. In an encoder M is X itself.

    held[B, S]  False where a position of M is padding

    >>> layer, held = nn.PaddedAttention(8, 2, dtype="float64"), np.array([[True, True, False]])
    >>> layer(Tensor(np.ones((1, 4, 8))), Tensor(np.ones((1, 3, 8))), held).shape
    (1, 4, 8)
    """

    def __init__(self, width: int, heads: int, *, name="attention", seed=0, dtype="float32"):
        check_heads(width, heads)
        self.heads, options = heads, {"seed": seed, "dtype": dtype}
        self.query = Linear(width, width, name=f"{name}.query", **options)
        self.key_value = Linear(width, 2 * width, name=f"{name}.key_value", **options)
        self.output = Linear(width, width, name=f"{name}.output", **options)

    # No layer of a Sequential is one: it has two inputs.
    def forward(self, x: Tensor, memory: Tensor, held: Array) -> Tensor:  # type: ignore[override]  # two inputs
        return self.read(x, self.keys_and_values(memory), held)

    def __call__(self, x: Tensor, memory: Tensor, held: Array) -> Tensor:  # type: ignore[override]  # two inputs
        return self.forward(x, memory, held)

    def keys_and_values(self, memory: Tensor) -> Tensor:
        """Return KV[2, B, H, S, D] of a memory M[B, S, C]."""
        kv = self.key_value(memory)
        B, S, width = kv.shape
        kv = kv.reshape(B, S, 2, self.heads, width // (2 * self.heads))
        return kv.transpose(2, 0, 3, 1, 4)

    def read(self, x: Tensor, kv: Tensor, held: Array) -> Tensor:
        """Return Y[B, T, C] of X[B, T, C] and the keys and values of a memory."""
        q = self.query(x)
        B, T, C = q.shape
        q = q.reshape(B, T, self.heads, C // self.heads).transpose(0, 2, 1, 3)
        mixed = padded_attention(q, kv, held)  # [B, H, T, D]
        return self.output(mixed.transpose(0, 2, 1, 3).reshape(B, T, C))


def check_heads(width: int, heads: int) -> None:
    """Raise ValueError unless the width splits into heads of equal width."""
    check_sizes(width=width, heads=heads)
    if width % heads:
        raise WrongInput(
            f"width {width} does not split into {heads} heads; use a multiple of {heads}"
        )


def attend_to_all(qkv: Tensor, randomness: Randomness | None = None) -> Tensor:
    """Attend on one device: QKV[G + 2, B, K, T, D] -> O[B, H, T, D], over every position.

    Where an example is several documents, queries see keys of their own (`Randomness.documents`).
    A strategy that cuts the sequence puts its own function in the place of this one.
    """
    positions = None if randomness is None else randomness.positions
    if positions is not None and not positions.whole:
        raise WrongInput(
            f"this attention sees {len(positions)} of {positions.length} positions; a sequence "
            "that is cut needs ring_attention or ulysses (context_parallel/)"
        )
    documents = None if randomness is None else randomness.document_runs(qkv.shape[3])
    return document_attention(qkv, documents)


class GroupedQueryAttention(Module):
    """Y[B, T, C] = concat over H heads of softmax(Q K^T / sqrt D) V, times W_o; rotary positions.

    The columns of `query` are [K, G, D], and of `key_value` [2, K, D]; there are no biases.

    theta   base of the angles of rotary positions
    attend  (QKV[G + 2, B, K, T, D], randomness) -> O[B, H, T, D]: G queries, then keys and values

    >>> nn.GroupedQueryAttention(8, 4, 2, dtype="float64")(Tensor(np.ones((5, 3, 8)))).shape
    (5, 3, 8)
    """

    def __init__(
        self, width, heads, kv_heads, theta=10000.0, *, name="attention", seed=0, dtype="float32"
    ):
        check_sizes(width=width, heads=heads, kv_heads=kv_heads)
        check_theta(theta)
        if heads % kv_heads or width % (2 * heads):
            raise WrongInput(
                f"width {width} needs {heads} heads of an even width, and {heads} query heads a "
                f"number of key and value heads that divides them, not {kv_heads}"
            )
        self.heads, self.kv_heads, self.theta = heads, kv_heads, theta
        self.attend, D = attend_to_all, width // heads
        options = {"seed": seed, "dtype": dtype, "bias": False}
        self.query = Linear(width, heads * D, name=f"{name}.query", **options)
        self.key_value = Linear(width, 2 * kv_heads * D, name=f"{name}.key_value", **options)
        self.output = Linear(heads * D, width, name=f"{name}.output", **options)

    def forward(self, x: Tensor, randomness: Randomness | None = None) -> Tensor:
        qkv = rotate(self.heads_of(*self.project(x)), self.theta, randomness)
        mixed = self.attend(qkv, randomness).transpose(0, 2, 1, 3)  # [B, T, H, D]
        B, T, H, D = mixed.shape
        return self.output(mixed.reshape(B, T, H * D))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """X[B, T, C] -> queries [B, T, H D], keys and values [B, T, 2 K D]."""
        return self.query(x), self.key_value(x)

    def heads_of(self, q: Tensor, kv: Tensor) -> Tensor:
        """Return QKV[G + 2, B, K, T, D] of queries [B, T, H D], keys and values [B, T, 2 K D]."""
        (B, T, width), H, K = q.shape, self.heads, self.kv_heads
        q = q.reshape(B, T, K, H // K, width // H).transpose(3, 0, 2, 1, 4)
        kv = kv.reshape(B, T, 2, K, width // H).transpose(2, 0, 3, 1, 4)
        return functions.concatenate([q, kv])
