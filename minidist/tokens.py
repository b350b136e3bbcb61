"""Tokens of every vocabulary that are no words of it."""

PAD, BEGIN, END = 0, 1, 2  # of a text that is read or written: filling, before it, after it
