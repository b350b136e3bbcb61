"""Text to learn, a character at a time: the help inside every CPython, or a file."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from minidist.errors import WrongInput


@dataclass(frozen=True)
class Text:
    """Characters as integers: tokens[n], each an index into `characters`, which are sorted."""

    tokens: np.ndarray
    characters: str
    source: str

    @property
    def vocab(self) -> int:
        return len(self.characters)

    def encode(self, string: str) -> np.ndarray:
        if unknown := sorted(set(string) - set(self.characters)):
            raise WrongInput(f"the character {unknown[0]!r} does not occur in {self.source}")
        return np.array([self.characters.index(c) for c in string], np.int64)

    def including(self, characters: str) -> "Text":
        """Return the same text, whose vocabulary has these characters, too."""
        union = "".join(sorted({*self.characters, *characters}))
        places = np.array([union.index(c) for c in self.characters])
        return Text(places[self.tokens], union, self.source)

    def decode(self, tokens) -> str:
        return "".join(self.characters[t] for t in tokens)

    def windows(self, context: int) -> tuple[np.ndarray, np.ndarray]:
        """Cut the text into inputs[n, T] and targets[n, T], one character later; drop the rest."""
        n = (len(self.tokens) - 1) // context
        cut = self.tokens[: n * context + 1]
        return cut[:-1].reshape(n, context), cut[1:].reshape(n, context)

    def bigram_entropy(self) -> float:
        """Return the entropy of a character given the one before, in nats, by this text's counts.

        No model that sees one character at a time can have a lower loss on this text.
        """
        pairs = np.zeros((self.vocab, self.vocab))
        np.add.at(pairs, (self.tokens[:-1], self.tokens[1:]), 1)
        firsts = pairs.sum(axis=1, keepdims=True)
        seen = pairs > 0
        return float(
            -(pairs[seen] * np.log((pairs / np.maximum(firsts, 1))[seen])).sum() / pairs.sum()
        )


def text(path: str | Path | None = None, context: int = 1) -> Text:
    """Return the text of a UTF-8 file, or by default the help topics inside CPython.

    context  characters of one window; ValueError if the text has fewer than context + 1 characters
    """
    if path is None:
        from pydoc_data.topics import topics

        string, source = (
            "\n".join(topics[name] for name in sorted(topics)),
            "the help topics of Python",
        )
    else:
        source = str(path)
        try:
            string = Path(path).read_bytes().decode("utf-8")
        except OSError as error:
            raise WrongInput(f"cannot read the text {source!r}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise WrongInput(
                f"{source} is not UTF-8 text: {error.reason} at byte {error.start}"
            ) from error
        if "\0" in string:
            raise WrongInput(
                f"{source} is not text: it holds a zero byte at character {string.index(chr(0))}"
            )
        string = string.removeprefix("\ufeff").replace("\r\n", "\n")
    if len(string) <= context:
        raise WrongInput(
            f"{source} has {len(string)} characters; "
            f"a context of {context} needs {context + 1} or more"
        )
    codes, tokens = np.unique(np.array([string]).view(np.uint32), return_inverse=True)
    return Text(tokens.reshape(-1).astype(np.int64), "".join(map(chr, codes)), source)
