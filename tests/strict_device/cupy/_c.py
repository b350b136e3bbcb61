"""Parse the small part of C that kernels are written in. Not a part of CuPy."""

import functools
import re

TOKEN = re.compile(
    r"\s+|//[^\n]*|(?P<number>0x[0-9a-fA-F]+U?L*|\d+\.?\d*(?:e[-+]?\d+)?U?L*)|(?P<name>[A-Za-z_]\w*)"
    r"|(?P<symbol>\+\+|<<|>>|[-+*/<>=!]=|&&|\|\||[-+*/%<>=!&|^?:.,;(){}\[\]])"
)
LEVELS = ["||", "&&", "|", "^", "&", "== !=", "< <= > >=", "<< >>", "+ -", "* / %"]


def tokens(text: str) -> list[tuple[str, str]]:
    found, at = [], 0
    while at < len(text):
        match = TOKEN.match(text, at)
        if match is None:
            raise SyntaxError(f"this C is not understood: {text[at : at + 30]!r}")
        at = match.end()
        if match.lastgroup:
            found.append((match.lastgroup, match[0]))
    return [*found, ("end", "")]


class Parser:
    """Turn C into nested tuples: (kind, parts). `types` are the names of types in this kernel."""

    def __init__(self, text: str, types: set[str]):
        self.tokens, self.at, self.types = tokens(text), 0, types

    def peek(self, *symbols: str) -> bool:
        return self.tokens[self.at][1] in symbols

    def take(self, symbol: str | None = None) -> str:
        word = self.tokens[self.at][1]
        if symbol is not None and word != symbol:
            raise SyntaxError(f"C: expected {symbol!r}, found {word!r}")
        self.at += 1
        return word

    def maybe(self, *symbols: str) -> str | None:
        return self.take() if self.peek(*symbols) else None

    def many(self, item, until: str, separator: str | None = ",") -> list:
        """Take items up to a closing symbol."""
        found = []
        while not self.peek(until):
            found.append(item())
            if separator and not self.peek(until):
                self.take(separator)
        self.take()
        return found

    def type(self) -> str | None:
        """Take the name of a type, if one is here."""
        for words in (3, 2, 1):
            name = " ".join(word for _, word in self.tokens[self.at : self.at + words])
            if name in self.types:
                self.at += words
                return name
        return None

    def definitions(self) -> list:
        """Take a preamble: structs and functions."""
        found = []
        while not self.peek(""):
            if self.maybe("struct"):
                self.types.add(name := self.take())
                self.take("{")
                fields = [f for line in self.many(self.statement, "}", None) for f in line[1]]
                self.take(";")
                found.append(("struct", name, [(kind, field) for kind, field, *_ in fields]))
            else:
                self.take("__device__")
                self.type()
                name, _ = self.take(), self.take("(")
                parameters = self.many(lambda: (self.type(), self.take()), ")")
                found.append(("function", name, parameters, self.statement()))
        return found

    def statements(self) -> tuple:
        return "block", self.many(self.statement, "", None)

    def statement(self) -> tuple:
        if self.maybe("{"):
            return "block", self.many(self.statement, "}", None)
        if self.maybe("if"):
            condition, then = self.parenthesis(), self.statement()
            return "if", condition, then, self.statement() if self.maybe("else") else ("block", [])
        if self.maybe("while"):
            return "while", self.parenthesis(), self.statement(), ("block", [])
        if self.maybe("for"):
            self.take("(")
            begin, condition = self.statement(), self.statement()
            step = ("block", []) if self.peek(")") else self.expression()
            self.take(")")
            return "block", [begin, ("while", condition, self.statement(), step)]
        if self.maybe("return"):
            result = "return", self.expression()
        elif self.peek(";"):
            result = "block", []
        else:
            result = self.declaration() or self.expression()
        if not self.peek(""):
            self.take(";")
        return result

    def declaration(self) -> tuple | None:
        before, kind = self.at, self.type()
        if kind is None or self.peek("(", "{"):
            self.at = before
            return None
        found = []
        while not found or self.maybe(","):
            found.append((kind, self.take(), self.assignment() if self.maybe("=") else None))
        return "declare", found

    def parenthesis(self) -> tuple:
        self.take("(")
        inner = self.expression()
        self.take(")")
        return inner

    def expression(self) -> tuple:
        result = self.assignment()
        while self.maybe(","):
            result = "comma", result, self.assignment()
        return result

    def assignment(self) -> tuple:
        left = self.binary(0)
        if self.maybe("?"):
            then = self.assignment()
            self.take(":")
            return "choose", left, then, self.assignment()
        if self.maybe("="):
            return "assign", left, self.assignment()
        if symbol := self.maybe("+=", "-=", "*=", "/="):
            return "assign", left, ("binary", symbol[0], left, self.assignment())
        return left

    def binary(self, level: int) -> tuple:
        if level == len(LEVELS):
            return self.unary()
        left = self.binary(level + 1)
        while symbol := self.maybe(*LEVELS[level].split()):
            left = "binary", symbol, left, self.binary(level + 1)
        return left

    def unary(self) -> tuple:
        if symbol := self.maybe("-", "!"):
            return "unary", symbol, self.unary()
        return self.postfix(self.primary())

    def primary(self) -> tuple:
        if self.peek("("):
            return self.parenthesis()
        if kind := self.type():
            if self.maybe("{"):
                return "make", kind, self.many(self.assignment, "}")
            return "cast", kind, self.parenthesis()
        group, word = self.tokens[self.at]
        self.at += 1
        if group == "number":
            return "number", word
        if group != "name":
            raise SyntaxError(f"C: unexpected {word!r}")
        if self.maybe("("):
            return "call", word, self.many(self.assignment, ")")
        return "name", word

    def postfix(self, value: tuple) -> tuple:
        while symbol := self.maybe("[", ".", "++"):
            if symbol == "[":
                value = "index", value, self.expression()
                self.take("]")
            elif symbol == ".":
                value = "field", value, self.take()
            else:
                value = "increment", value
        return value


@functools.cache
def parsed(text: str, types: frozenset, what: str) -> tuple:
    """Return the definitions, statements or one expression of a text, and the types it adds."""
    parser = Parser(text, set(types))
    tree = getattr(parser, what)()
    if parser.at < len(parser.tokens) and not parser.peek(""):
        raise SyntaxError(f"C: what is {parser.take()!r} in {text!r}?")
    return tree, frozenset(parser.types)
