"""Two translators that are trained together: there, and back again.

    loss = CE(there(x), y) + CE(back(y), x) + weight CE(back(what `there` wrote), x)

The last term is the reconstruction: from what the first translator wrote, the second one has to
find the source. He et al., Dual Learning for Machine Translation, 2016, train two translators in
this way on texts without translations, after a start with few pairs. Tu et al., Neural Machine
Translation with Reconstruction, 2017, add the term to the supervised loss, as here.

A word is discrete: a small step of the weights does not change which one is the most likely, so no
gradient passes through the choice. He et al. use a policy gradient. Tu et al. read the decoder's
hidden states, not its words. Here the second model reads, at each position,

    read="soft"  P E: the mixture of its embeddings E[V, C], weighted by the first model's
                 P = softmax(logits). The gradient passes through P to the first model.
    read="hard"  the row of E of the most likely word. The term has no gradient for the first model;
                 the second learns to understand what the first one writes.

Both use teacher forcing: word t is written after the right words before it. So what was written is
as long as the right target: from the target's END on, the second model reads padding. Before it,
every word that was written is read, also a PAD or an END.

Letters: S words of a source, T of a target with its END, U and V the vocabularies of both sides.

    tokens[B, S + T]           x, padding | BEGIN, y, padding  the rows of `there`
    tokens[B, T - 1 + S + 1]   y, padding | BEGIN, x, padding  the same pairs, for `back`
    targets[B, T + S + 1]      y, END, IGNORED | x, END, IGNORED
"""

import math

from minidist.autograd import Tensor, functions
from minidist.autograd.losses import IGNORED, cross_entropy, reduction_size_or, values_of
from minidist.backend import Array, array_module, whole_numbers
from minidist.errors import WrongInput, check_name, check_number
from minidist.nn.embedding import END, PAD
from minidist.nn.module import Module
from minidist.nn.seq2seq import Seq2Seq, joined
from minidist.rng import Randomness

READS = "soft", "hard"


class Dual(Module):
    """tokens[B, S + T] -> the logits of all terms, flat: [B, T V + (S + 1) U + (S + 1) U].

    `loss` cuts them into the terms. With weight 0 the last term is not computed.

    there   from S words of a vocabulary of U to T of V, END included
    back    from T - 1 words of V to S + 1 of U; its parameters have other names (`name=`)
    weight  of the reconstruction, from 0
    read    "soft" or "hard": how `back` reads what `there` wrote

    In one step both passes of `back` have the same dropout masks.
    """

    def __init__(self, there: Seq2Seq, back: Seq2Seq, weight: float = 1.0, read: str = "soft"):
        check_pair(there, back)
        check_name("way to read", read, READS)
        allowed = "the weight of the reconstruction is a number from 0"
        check_number(allowed, weight, lambda x: 0 <= x < math.inf)
        self.there, self.back, self.weight, self.read = there, back, weight, read
        for layer in (*there.layers, *back.layers):
            layer.flat = None  # one vector has them all
        self.flatten()

    def forward(self, tokens: Array, randomness: Randomness | None = None) -> Tensor:
        turned = self.turned(tokens)
        logits = self.there(tokens, randomness)
        parts = [logits, self.back(turned, randomness)]
        if self.weight:
            parts.append(self.reconstruct(logits, turned, randomness))
        rows = [part.reshape(len(tokens), part.shape[1] * part.shape[2]) for part in parts]
        return functions.concatenate(rows, axis=1)

    def turned(self, tokens: Array) -> Array:
        """Return the rows of `back` that are the same pairs as tokens[B, S + T] of `there`."""
        S, T = self.there.source_length, self.there.target_length
        tokens = whole_numbers(tokens, "token indices")
        if len(tokens.shape) != 2 or tokens.shape[1] != S + T:
            raise WrongInput(
                f"tokens are [B, {S} + {T}], source | BEGIN, target, not {list(tokens.shape)}"
            )
        source, begin, target = tokens[:, :S], tokens[:, S : S + 1], tokens[:, S + 1 :]
        return array_module(tokens).concatenate([target, begin, source], axis=1)

    def reconstruct(
        self, logits: Tensor, turned: Array, randomness: Randomness | None = None
    ) -> Tensor:
        """Run `back` on what `there` wrote: logits[B, T, V] -> logits[B, S + 1, U]."""
        embedding = self.back.embedding
        source, table = embedding.source, embedding.source.token.weight
        length, logits = self.back.source_length, logits[:, :-1]  # after the last word comes END
        if self.read == "soft":
            x = functions.linear(functions.softmax(logits), table)
        else:
            x = functions.embedding(logits.data.argmax(axis=-1), table)
        x = source.dropout(x + source.position.weight, randomness)
        target = embedding.target(turned[:, length:], randomness)
        x = joined(x, turned[:, :length] != PAD, target)
        for layer in self.back.layers[1:]:
            x = layer(x, randomness)
        return x

    def targets(self, tokens: Array) -> Array:
        """Return targets[B, T + S + 1] of both directions, made from tokens[B, S + T]."""
        turned, length = self.turned(tokens), self.back.source_length
        both = ended(turned[:, :length]), ended(turned[:, length + 1 :])
        return array_module(tokens).concatenate(both, axis=1)

    def loss(self, outputs: Tensor, targets: Array, reduction_size: float | None = None) -> Tensor:
        """Return the three sums of -log p, the last one times `weight`, over `reduction_size`.

        That is one number for all terms, by default the targets of both directions that count.

        targets  [B, T + S + 1], as `targets` makes them
        """
        S, T = self.there.source_length, self.there.target_length
        targets = values_of(targets)
        if targets.shape != (len(outputs), T + S + 1):
            raise WrongInput(
                f"targets are [{len(outputs)}, {T} + {S + 1}], those of both directions, not "
                f"{list(targets.shape)}; make them with targets(tokens)"
            )
        n = reduction_size_or(targets, reduction_size)
        there, back = targets[:, :T], targets[:, T:]
        first, second = T * self.there.vocab, (S + 1) * self.back.vocab
        last = first + second
        loss = nll(outputs[:, :first], there, n) + nll(outputs[:, first:last], back, n)
        if self.weight:
            loss = loss + self.weight * nll(outputs[:, last:], back, n)
        return loss


def ended(words: Array) -> Array:
    """Return targets[B, S + 1] of words[B, S] and padding: the words, END, and IGNORED."""
    xp = array_module(words)
    nothing = xp.full_like(words[:, :1], PAD)
    behind = xp.concatenate([nothing == PAD, words != PAD], axis=1)  # after a word, or at first
    words = xp.concatenate([words, nothing], axis=1)
    return xp.where(words != PAD, words, xp.where(behind, END, IGNORED))


def nll(rows: Tensor, targets: Array, n: float) -> Tensor:
    """Return the sum of -log p of flattened logits, rows[B, T V], over n."""
    B, T = targets.shape
    return cross_entropy(rows.reshape(B, T, rows.shape[1] // T), targets, n)


def check_pair(there: Seq2Seq, back: Seq2Seq) -> None:
    """Raise ValueError unless each can read what the other one writes."""
    for name, have, want in (
        ("source_vocab", back.source_vocab, there.vocab),
        ("target_vocab", back.vocab, there.source_vocab),
        ("source_length", back.source_length, there.target_length - 1),
        ("target_length", back.target_length, there.source_length + 1),
    ):
        if have != want:
            raise WrongInput(
                f"the model of the way back needs {name}={want}, not {have}: it reads what the "
                "first one writes, without END, and writes what that one reads, with END"
            )
