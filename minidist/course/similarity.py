"""How much code two submissions share, whatever its names, its layout and its order.

Winnowing (Schleimer, Wilkerson and Aiken 2003, "Winnowing: local algorithms for document
fingerprinting", section 3): of each W consecutive runs of K symbols, the one with the least hash is
a fingerprint. Fingerprints of the starter do not count, nor do the package's between two students.

    symbols  tokens without comments, layout, docstrings, parentheses. Numbers, texts, names are one
             symbol each; a name that is called, or an attribute, stays if the starter has it
    bits     log2((n + 1) / k) for a fingerprint that k of n submissions have (Spaerck Jones 1972):
             what everybody writes weighs next to nothing
    share    bits that both have / bits of the smaller one, at least the bits of FEWEST rare ones
"""

import builtins
import io
import re
import tokenize
from collections import Counter
from contextlib import suppress
from hashlib import blake2b
from itertools import chain, combinations, islice
from keyword import iskeyword
from math import log2

from minidist.course.lab import Lab
from minidist.verify.mistakes.register import source as source_of

K, W, FEWEST = 10, 4, 5
MOST = 10_000  # tokens of a file that are read
LEFT_OUT = tokenize.COMMENT, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER
KNOWN = {*dir(builtins), *dir(list), *dir(dict)}
Files = dict[str, str]  # {path in the package: source}


def shared(students: dict[str, Files], lab: Lab) -> tuple[dict[str, float], dict[tuple, float]]:
    """Return each one's share with the package, and {(one, another): share}, largest first."""
    starter = lab.blanked()
    given = fingerprints(starter, starter)
    package = fingerprints({path: source_of(path) for path in lab.files}, starter) - given
    all_of = {name: fingerprints(files, starter) - given for name, files in students.items()}
    own = {name: prints - package for name, prints in all_of.items()}
    rare = log2(len(own) + 1)
    bits = {hash: rare - log2(k) for hash, k in Counter(chain(*own.values())).items()}
    weights = {
        name: max(sum(bits[hash] for hash in prints), FEWEST * rare) for name, prints in own.items()
    }
    pairs = {
        (a, b): sum(bits[hash] for hash in own[a] & own[b]) / min(weights[a], weights[b])
        for a, b in combinations(own, 2)
    }
    like = {name: len(all & package) / max(1, len(all)) for name, all in all_of.items()}
    return like, dict(sorted(pairs.items(), key=lambda pair: -pair[1]))


def fingerprints(files: Files, starter: Files) -> set[int]:
    """Return the fingerprints of some files, as tokens: nothing of them is run or parsed."""
    prints: set[int] = set()
    for path, source in files.items():
        words = symbols(source, {*re.findall(r"\w+", starter[path]), *KNOWN})
        runs = [" ".join(words[i : i + K]).encode() for i in range(len(words) - K + 1)]
        hashes = [int.from_bytes(blake2b(run, digest_size=8).digest()) for run in runs]
        prints |= {min(hashes[i : i + W]) for i in range(len(hashes) - W + 1)}
    return prints


def symbols(source: str, known: set[str]) -> list[str]:
    """Return the symbols of a source, up to the first token that Python cannot read."""
    tokens: list[tokenize.TokenInfo] = []
    with suppress(tokenize.TokenError, SyntaxError):
        tokens += islice(tokenize.generate_tokens(io.StringIO(source).readline), MOST)
    tokens = [token for token in tokens if token.type not in LEFT_OUT]
    texts = ["", *(token.string for token in tokens), ""]
    found, begins = list[str](), True
    for token, before, text, after in zip(tokens, texts, texts[1:], texts[2:], strict=False):
        is_text, ends = token.type == tokenize.STRING, token.type == tokenize.NEWLINE
        if ends or (is_text and begins) or text in "();":
            begins = ends
            continue
        begins = False
        called = before == "." or after == "("
        is_own = token.type == tokenize.NAME and not iskeyword(text)
        is_own = is_own and not (called and text in known)
        is_kind = is_own or token.type in (tokenize.STRING, tokenize.NUMBER)
        found.append(tokenize.tok_name[token.type] if is_kind else text)
    return found
