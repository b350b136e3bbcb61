"""Wrong implementations, as data: which function, what becomes of it, and who must see it.

*.toml        the register: a mistake a table, a file a subject
register.py   reads them; plants them in the functions of the running interpreter
edits.py      makes an edit in a function's syntax tree
overlay.py    writes minidist with some files replaced: mutated ones, a student's, blanked ones
"""
