"""Rank pairs of submissions by the code that they share, whatever its names and its order.

Winnowing (Schleimer, Wilkerson and Aiken 2003, "Winnowing: local algorithms for document
fingerprinting", section 3): of each W consecutive K-grams of a function's symbols, the one with the
least hash is a fingerprint. No shared run of less than K symbols counts. One of W + K - 1 = 13 or
more is always found, unless all its K-grams are the starter's: these are left out before.

    symbols  tokens without comments, layout, docstrings, parentheses. Numbers, texts, names are one
             symbol each, but what is called or an attribute stays if Python or the starter has it
    bits     log2((n + 1) / k) for a fingerprint that k of n submissions have (Spaerck Jones 1972):
             what everybody writes weighs next to nothing, what the reference has weighs nothing
    share    bits that both have / bits of the smaller one, at least the bits of FEWEST rare ones
"""

import builtins
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from difflib import SequenceMatcher
from hashlib import blake2b
from itertools import chain, combinations, groupby, islice
from keyword import iskeyword
from math import inf, log2
from pathlib import Path
from typing import NamedTuple

from minidist.course.lab import Lab
from minidist.course.sandbox.untrusted import plain
from minidist.course.submissions import check_no_link, handed_in
from minidist.errors import WrongInput, plural
from minidist.verify.mistakes.register import source as source_of

K, W, FEWEST = 10, 4, 5
MOST = 10_000  # tokens of a file that are read
BINDS = r"^(?:(?:from \S+ )?import (?:\([^)]*\)|.*)|(?:def|class) \w+)"  # at the top of a file


class Submission(NamedTuple):
    """Its K-grams in order: (hash; inf: the starter's, "path:line"); its fingerprints."""

    name: str
    grams: list[tuple[float, str]]
    prints: dict[float, str]  # {hash: function}


class Reader:
    """Reads submissions of a lab as tokens: nothing of them is run or parsed."""

    def __init__(self, lab: Lab):
        self.given, self.starter = lab.blanked(), set[float]()
        self.labels = {at: f"{task.id} {at[1]}" for task in lab.tasks for at in task.targets}
        self.starter = {gram for gram, _ in self.read("starter", self.given).grams}

    def read(self, name: str, files: dict[str, str]) -> Submission:
        """Return a submission; files: {path in the package: source}."""
        found = Submission(name, [], {})
        for path, source in files.items():
            for function, group in groupby(_symbols(source, self.given[path]), lambda s: s[0]):
                label, symbols = self.labels.get((path, function), function or path), list(group)
                hashes: list[float] = []
                for i in range(len(symbols) - K + 1):
                    text = " ".join(symbol for _, symbol, _ in symbols[i : i + K])
                    gram = int.from_bytes(blake2b(text.encode(), digest_size=8).digest())
                    hashes.append(inf if gram in self.starter else gram)
                    found.grams.append((hashes[-1], f"{path}:{symbols[i][2]}"))
                found.grams.append((inf, ""))  # no run goes on in the next function
                for i in range(max(1, len(hashes) - W + 1)):
                    found.prints[min(hashes[i : i + W], default=inf)] = label
        found.prints.pop(inf, None)
        return found


def _symbols(source: str, given: str) -> Iterator[tuple[str, str, int]]:
    """Yield (function, symbol, line) of each token, up to the first that Python cannot read."""
    attributes = {*re.findall(r"\w+", given), *dir(list), *dir(dict)}
    called = {*re.findall(r"\w+", " ".join(re.findall(BINDS, given, re.M))), *dir(builtins)}
    tokens: list[tokenize.TokenInfo] = []
    with suppress(tokenize.TokenError, SyntaxError):
        tokens += islice(tokenize.generate_tokens(io.StringIO(source).readline), MOST)
    tokens = [token for token in tokens if token.type not in (tokenize.COMMENT, tokenize.NL)]
    texts = ["", *(token.string for token in tokens), ""]
    function, owner, column, begins = "", "", inf, True
    for token, before, text, after in zip(tokens, texts, texts[1:], texts[2:], strict=False):
        kind = tokenize.tok_name[token.type]
        if kind in ("NEWLINE", "INDENT", "DEDENT"):
            begins = True
            continue
        if begins and token.start[1] <= column:  # the function before has ended
            owner = f"{after}." if text == "class" else owner if token.start[1] else ""
            function, column = owner, inf
            if text == "def":
                function, column = owner + after, token.start[1]
        docstring = begins and kind == "STRING" and not after.strip()
        goes_on = kind == "STRING" and before.endswith(("'", '"'))  # "a" "b" is one text
        begins = False
        if docstring or goes_on or text in "();" or (text == "," and after in ")]}="):
            continue
        if kind == "NUMBER" or "STRING" in kind:
            text = kind
        elif kind == "NAME" and not iskeyword(text):
            stays = text in attributes if before == "." else after == "(" and text in called
            text = text if stays else "NAME"
        yield function, text, token.start[0]


def read_all(folders: list[Path], lab: Lab) -> tuple[list[Submission], Submission, list[str]]:
    """Return the submissions, the package's own, and in words what could not be read.

    ValueError unless there are two to compare.
    """
    reader, remarks = Reader(lab), list[str]()
    readable: list[Submission] = []
    unique = len({folder.name for folder in folders}) == len(folders)
    for folder in folders:
        name = folder.name if unique else str(folder)
        try:
            check_no_link(folder)
            files, unusable = handed_in(folder, lab.files)
        except (OSError, ValueError) as error:
            remarks.append(plain(f"{name}: {error}"))
            continue
        remarks += [plain(f"{name}/minidist/{path}: {why}") for path, why in unusable.items()]
        readable.append(reader.read(plain(name), files))
    if len(readable) < 2:
        count = plural(len(readable), "submission")
        raise WrongInput(f"{count} of lab {lab.name}; a pair needs two")
    return readable, reader.read("the package", {p: source_of(p) for p in lab.files}), remarks


def table(pairs: list[dict]) -> str:
    """Return pairs as lines, with a head, and a line that says what a run is."""
    rows = [("share", "run", "first", "second", "shared functions")]
    for pair in pairs:
        first, second = map("{} {}".format, pair["between"], pair["places"])
        functions = ", ".join(pair["functions"][:3])
        if len(pair["functions"]) > 3:
            functions += f" and {len(pair['functions']) - 3} more"
        rows.append((f"{pair['share']:.2f}", str(pair["run"]), first, second, functions))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    end = "run: symbols of the longest shared run, which begins at the two places"
    return "\n".join([*lines, end])


def pairs(found: list[Submission], reference: Submission, above: float) -> list[dict]:
    """Return the pairs that share at least `above`, best first.

    Those with the reference are among them: the share of the first one's fingerprints, all alike.
    `functions` are of the first, most shared first; `run` is in symbols, and begins at `places`.
    """
    theirs, rare = {gram for gram, _ in reference.grams}, log2(len(found) + 1)
    own = [one.prints.keys() - theirs for one in found]
    bits = {gram: rare - log2(k) for gram, k in Counter(chain(*own)).items()}
    weights = [max(sum(bits[gram] for gram in grams), FEWEST * rare) for grams in own]
    rows = [
        (sum(bits[gram] for gram in own[i] & own[j]) / min(weights[i], weights[j]), a, b, theirs)
        for (i, a), (j, b) in combinations(enumerate(found), 2)
    ]
    for one, grams in zip(found, own, strict=True):
        rows.append((1 - len(grams) / max(1, len(one.prints)), one, reference, set()))
    rows.sort(key=lambda row: -row[0])
    return [_pair(*row) for row in rows if row[0] >= above and row[0] and row[1].prints]


def _pair(share: float, a: Submission, b: Submission, ignored: set[float]) -> dict:
    shared = Counter(a.prints[gram] for gram in a.prints.keys() & (b.prints.keys() - ignored))
    ignored = ignored | {inf}  # below, what is ignored equals nothing
    first, second = ([object() if g in ignored else g for g, _ in x.grams] for x in (a, b))
    run = SequenceMatcher(None, first, second).find_longest_match()
    return {
        "share": round(share, 3),
        "between": [a.name, b.name],
        "functions": [name for name, _ in shared.most_common()],
        "run": run.size + K - 1,
        "places": [a.grams[run.a][1], b.grams[run.b][1]],
    }
