"""Wrong implementations, as data: which function, what becomes of it, and who must see it.

*.toml        the register: a mistake a table, a file a subject
register.py   reads them
edits.py      makes an edit in a function's syntax tree
planted.py    puts a mistake into the functions of the running interpreter
overlay.py    writes minidist with some files replaced: mutated ones, a student's, blanked ones
"""
