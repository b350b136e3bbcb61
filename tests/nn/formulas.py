"""Transformers in NumPy, from their equations: nothing of the package but the masks of dropout."""

import numpy as np

from minidist.nn.embedding import PAD


class Layers:
    """The layers of a model, by the names of their parameters, in training with this randomness."""

    def __init__(self, model, rate, randomness):
        self.state, self.heads = model.state(), model.layers[1].attention.heads
        self.rate, self.randomness = rate, randomness

    def dropped(self, x, name):
        return x * self.randomness.keep(name, self.rate, x.shape) / (1 - self.rate)

    def linear(self, x, name):
        return x @ self.state[f"{name}.weight"] + self.state[f"{name}.bias"]

    def norm(self, x, name):
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)
        return x * self.state[f"{name}.gain"] + self.state[f"{name}.bias"]

    def mixed(self, q, k, v, seen):
        """Return O[B, T, C]; `seen` is whether a query sees a key. One that sees none gets 0."""
        found, cut = [], [np.split(x, self.heads, axis=-1) for x in (q, k, v)]
        for q_h, k_h, v_h in zip(*cut, strict=True):
            scores = q_h @ k_h.swapaxes(1, 2) / np.sqrt(q_h.shape[-1])
            scores = np.where(seen, scores, -1e300)
            p = np.exp(scores - scores.max(-1, keepdims=True)) * seen
            found.append(p / np.maximum(p.sum(-1, keepdims=True), 1e-300) @ v_h)
        return np.concatenate(found, axis=-1)

    def causal(self, x, name):
        q, k, v = np.split(self.linear(x, f"{name}.qkv"), 3, axis=-1)
        earlier = np.tril(np.ones((x.shape[1], x.shape[1]), bool))
        return self.linear(self.mixed(q, k, v, earlier), f"{name}.output")

    def read(self, x, memory, seen, name):
        k, v = np.split(self.linear(memory, f"{name}.key_value"), 2, axis=-1)
        q = self.linear(x, f"{name}.query")
        return self.linear(self.mixed(q, k, v, seen), f"{name}.output")

    def feed_forward(self, x, name):
        u = self.linear(x, f"{name}.expand")
        u = u / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (u + 0.044715 * u**3)))
        return self.linear(u, f"{name}.contract")

    def embedded(self, tokens, name):
        x = self.state[f"{name}.token.weight"][tokens]
        x = x + self.state[f"{name}.position.weight"][: tokens.shape[1]]
        return self.dropped(x, f"{name}.dropout")


def transformer(model, tokens, randomness):
    """Return the logits[B, T, V] of a Transformer without experts."""
    of = Layers(model, model.layers[0].dropout.rate, randomness)
    x = of.embedded(tokens, "embedding")
    for i in range(len(model.layers) - 2):
        at = f"blocks.{i}"
        h = of.causal(of.norm(x, f"{at}.norm_1"), f"{at}.attention")
        x = x + of.dropped(h, f"{at}.dropout_1")
        h = of.feed_forward(of.norm(x, f"{at}.norm_2"), at)
        x = x + of.dropped(h, f"{at}.dropout_2")
    tied = "head.linear.weight" not in of.state
    weight = of.state["embedding.token.weight"].T if tied else of.state["head.linear.weight"]
    return of.norm(x, "head.norm") @ weight


def seq2seq(model, tokens, randomness):
    """Return the logits[B, T, V] of a Seq2Seq; what is padding is read from the tokens."""
    source, target = np.split(tokens, [model.source_length], axis=1)
    words, depth = (source != PAD)[:, None, :], (len(model.layers) - 2) // 2
    of = Layers(model, model.layers[0].source.dropout.rate, randomness)
    x, y = of.embedded(source, "embedding.source"), of.embedded(target, "embedding.target")
    for i in range(depth):
        at = f"encoder.{i}"
        h = of.norm(x, f"{at}.norm_1")
        x = x + of.dropped(of.read(h, h, words, f"{at}.attention"), f"{at}.dropout_1")
        x = x + of.dropped(of.feed_forward(of.norm(x, f"{at}.norm_2"), at), f"{at}.dropout_2")
    for i in range(depth):
        at = f"decoder.{i}"
        h = of.causal(of.norm(y, f"{at}.norm_1"), f"{at}.attention")
        y = y + of.dropped(h, f"{at}.dropout_1")
        memory = of.norm(x, f"{at}.norm_source")
        h = of.read(of.norm(y, f"{at}.norm_2"), memory, words, f"{at}.cross")
        y = y + of.dropped(h, f"{at}.dropout_2")
        y = y + of.dropped(of.feed_forward(of.norm(y, f"{at}.norm_3"), at), f"{at}.dropout_3")
    return of.norm(y, "head.norm") @ of.state["head.linear.weight"]
