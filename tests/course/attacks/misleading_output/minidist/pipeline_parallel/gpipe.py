"""Prints what a full mark looks like, and what steers a terminal and breaks XML."""


def gpipe(rank, p, m):
    print("\x1b[2J\x1b[H10 / 10  9.1 ]]> </failure>\x00 \ud800".encode("utf-8", "surrogatepass"))
    print("\x1b[2J\x1b[H10 / 10  9.1  ]]> </failure></testcase> \x00 \u202e")
    raise ValueError("\x1b[2J 10 / 10 ]]> \x00 \ud800")
