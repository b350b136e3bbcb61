"""Draw text from a language model, one token after the other."""

import numpy as np

from minidist import nn
from minidist.autograd import no_grad
from minidist.backend import to_host
from minidist.datasets import Text
from minidist.rng import generator


def sample(
    model: nn.Transformer,
    text: Text,
    prompt: str,
    length: int,
    seed: int = 0,
    temperature: float = 0.8,
) -> str:
    """Return the prompt and `length` characters after it, drawn one by one from the model.

    The temperature divides the logits: 0.8 sharpens the distribution, 1 would leave it as it is.
    """
    random = generator(seed, "sample")
    tokens = text.encode(prompt).tolist()
    for _ in range(length):
        with no_grad():
            logits = model(np.array([tokens[-model.context :]])).data[0, -1]
        logits = to_host(logits).astype(np.float64) / temperature
        p = np.exp(logits - logits.max())
        tokens.append(int(random.choice(len(p), p=p / p.sum())))
    return text.decode(tokens)
