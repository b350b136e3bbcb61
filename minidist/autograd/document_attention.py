"""Attention within documents: a window holds several, and no query sees a key of another one.

Dubey et al., The Llama 3 Herd of Models (2024), section 3.2. Every document is computed as if it
were alone, so no mask of T x T is made, and work falls with the documents' lengths. Letters: B
windows of T positions; K heads of keys and values, each read by G of the H query heads.

Positions go on through the window. Rotary ones need no new start in a document, because a score
depends on the difference of two positions; learnt ones are those of the window. The loss decides
by its targets whether the last position of a document predicts the first of the next one.
"""

from minidist.autograd import functions
from minidist.autograd.attention import causal_attention
from minidist.autograd.tensor import Tensor
from minidist.pieces import Documents


def document_attention(qkv: Tensor, documents: Documents | None) -> Tensor:
    """Attend to earlier positions of the same document: QKV[G + 2, B, K, T, D] -> O[B, H, T, D].

    documents  (first, last + 1) of each window's documents, all T positions; None: one a window
    """
    if not documents:
        return causal_attention(qkv)
    windows = [qkv[:, i : i + 1] for i in range(len(documents))]
    found = [
        functions.concatenate([causal_attention(one[..., a:b, :]) for a, b in runs], axis=2)
        for one, runs in zip(windows, documents, strict=True)
    ]
    return functions.concatenate(found)
