"""The tokens that every vocabulary has besides its words.

BEGIN  before a text that is written
END    after it
PAD    after a text that is shorter than its row
"""

PAD, BEGIN, END = 0, 1, 2
