"""Programs that were written are read as they were; what is no program is refused with a remedy."""

import csv
import io

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from minidist.pipeline_parallel import add_communication, grid, programs, read, validate, write
from minidist.pipeline_parallel.actions import Forward, Programs, Reduce
from minidist.pipeline_parallel.text import FORMATS, as_text
from tests.pipeline_parallel.oracles import assert_same
from tests.strategies import linear_extensions, schedules

V = """\
placement  0 3 | 1 2
rank 0     F0 F0.1 (F1 B0.1) F1.1 B1.1 B0 B1
rank 1     F0 F0.1 F1 F1.1 B0.1 B1.1 B0 B1
"""
V_OF_TORCH = """\
0F0,3F0,(0F1;3B0)OVERLAP_F_B,3F1,3B1,0B0,0B1\r
1F0,2F0,1F1,2F1,2B0,2B1,1B0,1B1\r
"""


def with_chunks_ascending(made):
    """Return the same order; a rank's chunks are numbered by their stages, as PyTorch's text is."""
    to = [[sorted(own).index(k) for k in own] for own in made.placement]
    new = lambda r, a: type(a)(a.micro_batch, to[r][a.chunk])  # noqa: E731
    return Programs(
        [[new(r, a) for a in program] for r, program in enumerate(made)],
        [sorted(own) for own in made.placement],
        [(r, new(r, f), new(r, b)) for r, f, b in made.pairs],
    )


@given(drawn=schedules() | linear_extensions())
def test_programs_that_were_written_are_read_as_they_were(drawn):
    made, p, m = drawn
    text = as_text(made)
    assert_same(read(text), made)
    assert as_text(read(text)) == text
    validate(read(text), p, m)


@given(drawn=linear_extensions())
def test_so_they_are_in_the_format_of_pytorch_but_for_the_numbers_of_chunks(drawn):
    made, p, m = drawn
    text = as_text(made, "torch")
    assert_same(read(text), with_chunks_ascending(made))
    assert as_text(read(text), "torch") == text
    validate(read(text), p, m)


def test_the_two_formats_say_the_same():
    assert_same(read(V), read(V_OF_TORCH))
    assert as_text(read(V)) == V and as_text(read(V), "torch") == V_OF_TORCH
    assert read("1F0,0F0,1B0,0B0").placement == [[0, 1]]  # ascending, not as they come


def test_what_the_grid_prints_is_a_text():
    for made in (programs("1f1b", 3, 4), programs("interleaved", 2, 4, chunks=2)):
        assert_same(read(grid(made)), made)


def test_updates_and_reductions_have_a_text(tmp_path):
    made = programs("pipedream", 3, 4, replicas=[2, 1])
    assert_same(read(as_text(made)), made)
    made = programs("interleaved", 2, 4, chunks=2)
    made[1] += [Reduce(), Reduce(chunk=1)]
    assert as_text(made).endswith(" R R.1\n")
    assert_same(read(as_text(made)), made)
    assert as_text(made, "torch").endswith(",1REDUCE_GRAD,3REDUCE_GRAD\r\n")
    assert_same(read(as_text(made, "torch")), made)


@given(drawn=linear_extensions(), random=st.randoms(use_true_random=False))
def test_what_a_spreadsheet_saves_is_read(drawn, random):
    made = with_chunks_ascending(drawn[0])
    rows = [line.split(",") for line in as_text(made, "torch").splitlines()]
    for row in rows:  # idle cells, and spaces
        for _ in range(random.randrange(4)):
            row.insert(random.randint(0, len(row)), random.choice(["", " "]))
        row[:] = [random.choice([cell, f" {cell}", f"{cell} "]) for cell in row]
    longest = max(map(len, rows)) + random.randrange(2)
    rows = [row + [""] * (longest - len(row)) for row in rows]
    rows += [[""] * longest] * random.randrange(3)
    out = io.StringIO()
    quoting = random.choice([csv.QUOTE_ALL, csv.QUOTE_MINIMAL])
    csv.writer(out, quoting=quoting, lineterminator=random.choice(["\r\n", "\n"])).writerows(rows)
    assert_same(read(random.choice(["", "\ufeff"]) + out.getvalue()), made)


def test_a_file_a_path_and_a_text_are_told_apart(tmp_path, monkeypatch):
    made = read(V)
    for format, name in (("minidist", "own order.txt"), ("torch", "2F0.csv")):
        path = tmp_path / name
        write(made, path, format)
        monkeypatch.chdir(tmp_path)
        for source in (path, str(path), name):
            assert_same(read(source), made)
    write(made, "bom.txt")
    (tmp_path / "bom.txt").write_bytes(b"\xef\xbb\xbf" + V.replace("\n", "\r\n").encode())
    assert_same(read("bom.txt"), made)
    for text in ("rank 0 F0 B0", "0F0,0B0", "rank 0: F0 B0\n"):
        assert_same(read(text), programs("gpipe", 1, 1))
    for missing in ("own.txt", "own order.csv", "1f1b", ""):
        with pytest.raises(ValueError, match=f"there is no file '{missing}'"):
            read(missing)
    with pytest.raises(ValueError, match=r"cannot read '.*': Is a directory"):
        read(tmp_path)
    (tmp_path / "sheet.csv").write_bytes(V_OF_TORCH.encode("utf-16"))
    with pytest.raises(ValueError, match=r"sheet.csv is not UTF-8; save it as"):
        read("sheet.csv")


@pytest.mark.parametrize(
    "text, message",
    [
        ("rank 0 F0 X1 B0", "line 1, column 11: 'X1' is no action; write them as F3"),
        ("# mine\nrank 0 F0 >F0", r"line 2, column 11: '>F0' is a transfer; leave it out"),
        ("rank 0 F0 F.1", "line 1, column 11: 'F.1' is no action"),
        ("rank 0 F0 R1", "column 11: 'R1' is no action"),
        ("rank 0 F0 0B0", "column 11: '0B0' is no action; write them as F3"),
        (f"rank 0 F{'9' * 5000}", "column 8: 'F9{39}...' is no action"),
        ("rank 0 F0, B0", "column 8: 'F0,' is no action; .* with spaces"),
        ("rank 0 (F0 B0", r"column 8: '\(' has no other bracket; write a pair as \(F3 B2\)"),
        ("rank 0 F0 B0)", r"column 13: '\)' has no other bracket"),
        ("rank 0 (F0 B0 W0)", r"column 8: '\(F0 B0 W0\)' is no pair; write two actions"),
        (
            "rank 0 F0\nrank 2 F0",
            "line 2, column 1: rank 1 has no line; write 'rank 1 F0 B0'; they count from 0",
        ),
        ("rank 999999999 F0", "line 1, column 1: rank 0 has no line"),
        ("rank 0 F0.99999999", "chunk 99999999 would be of more than 1000000 stages"),
        ("rank 0 F0\nrank 0 F0", "line 2, column 1: a second line of rank 0; make one of both"),
        ("F0 B0\nrank 0 F0", "line 1, column 1: 'F0' begins no line; begin one with 'rank 0'"),
        ("placement 0 | x\nrank 0", "line 1, column 15: 'x' is no stage; write a placement as 0 3"),
        ("placement 0\nplacement 0\nrank 0", "line 2, column 1: a second placement; leave one"),
        ("placement 0 1\nrank 0\nrank 1", "line 1, .* 1 ranks have a placement, and 2 a line"),
        ("\n \n", "the text is empty; write a line per rank, such as 'rank 0 F0 B0'"),
        ("import x\ndef program(rank, p, m):", "is Python; paste it into .*, and save it as text"),
        ("0F0,0F1\n1F0,1B", "line 2, column 5: '1B' is no action; write 2F0: stage, kind"),
        ("0F0;0B0\n", "column 1: '0F0;0B0' is no action; .* commas between cells"),
        ('"0F0,0B0"\n', "column 2: '0F0,0B0' is no action"),
        ("F0 B0\n", "'F0 B0' is no action; .* in a text of ours, 'rank 0' before F0"),
        ("0F0,  0SEND_F0\n", "column 7: '0SEND_F0' is a lowered step; dump with format='compute_o"),
        ("0UNSHARD,0F0\n", "column 1: '0UNSHARD' is a lowered step; dump with"),
        ("0F0,0WAIT_REDUCE_GRAD\n", "column 5: '0WAIT_REDUCE_GRAD' is a lowered step"),
        ("0F0\n,\n1F0\n", "line 2, column 1: rank 1 has no action, hence no stage; remove its"),
        ("(0F0;0B0)OVERLAP\n", r"column 1: '\(0F0;0B0\)OVERLAP' is no pair; write one as \(0F3;1"),
        ("(0F0;0SEND_F0)OVERLAP_F_B\n", "column 6: '0SEND_F0' is a lowered step"),
        ("(0F0)OVERLAP_F_B\n", r"column 1: '\(0F0\)OVERLAP_F_B' is no pair"),
    ],
)
def test_what_is_no_program_is_refused_with_its_place_and_a_remedy(text, message):
    with pytest.raises(ValueError, match=message) as caught:
        read(text + "\n")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "made, format, message",
    [
        (add_communication(programs("1f1b", 2, 2)), "minidist", ">F0 is a transfer, which has no"),
        (programs("pipedream", 2, 2), "torch", "PyTorch has no word for U0; use format='minidist'"),
        (programs("pipedream", 2, 2, replicas=[2]), "torch", "stage 0 has replicas, for which"),
        ([[Forward(0, 1)]], "csv", "unknown format 'csv'; choose one of minidist, torch"),
        (Programs([[Forward(0, 1)]], [[0]]), "torch", "rank 0 has no chunk for F0.1"),
        (Programs([["F0"]]), "minidist", "'F0' has no text"),
        (Programs([[Forward(-1)]]), "minidist", "Forward.* has no text"),
        ([], "minidist", "no program for any rank"),
        (
            Programs(programs("1f1b", 1, 2), [[0]], [(0, *programs("1f1b", 1, 2)[0][2:0:-1])]),
            "minidist",
            "rank 0: F1 and B0 are a pair, and no neighbours",
        ),
    ],
)
def test_what_has_no_text_is_refused(made, format, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        write(made, tmp_path / "file", format)
    assert not (tmp_path / "file").exists()


PIECES = [
    *'0123FBIWUR().|,;"#:<> \n\r\t\ufeff',
    "rank ",
    "placement ",
    "\n0F0,",
    "OVERLAP_F_B",
    "\u0663",
]


@st.composite
def nearly_texts(draw):
    """Draw a text of programs in which some letters have changed."""
    text = as_text(draw(linear_extensions(max_p=2, max_m=2))[0], draw(st.sampled_from(FORMATS)))
    for _ in range(draw(st.integers(0, 3))):
        at, gone = draw(st.integers(0, len(text))), draw(st.integers(0, 3))
        text = text[:at] + draw(st.sampled_from(["", *PIECES])) + text[at + gone :]
    return text


@settings(max_examples=200)
@given(text=nearly_texts() | st.lists(st.sampled_from(PIECES), max_size=20).map("".join))
def test_any_text_is_programs_or_refused_in_one_line(text):
    try:
        made = read(text)
    except ValueError as error:
        assert len(str(error).splitlines()) == 1 and len(str(error)) < 300
        event("refused")
    else:
        assert_same(read(as_text(made)), made)
        event("programs")
