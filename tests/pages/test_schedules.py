"""The schedules' page: what it shows is what the validator, the simulator and the proof say."""

import json
from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from minidist.cli.options import exact_time as read_time
from minidist.observe.pages import answers
from minidist.observe.pages.schedules import FIRST, USUAL, answer, as_text
from minidist.pipeline_parallel import SCHEDULES, programs, read, validate
from minidist.pipeline_parallel.actions import updates
from minidist.pipeline_parallel.text import as_text as program_text
from minidist.planning import simulate
from tests.strategies import chunks_of, fitting, linear_extensions
from tests.strategies import schedules as any_schedule

TIMES = "forward", "backward_input", "backward_weight", "latency", "overhead"
PUZZLES = answer(puzzles="yes")["puzzles"]
decimals = st.sampled_from(["0", "1", "2", "0.5", "1/3", "7/4", "10"])


@st.composite
def questions(draw):
    """Draw a question about a named schedule."""
    name, p = draw(st.sampled_from(sorted(SCHEDULES))), draw(st.integers(1, 4))
    question = {"schedule": name, "p": p, "m": fitting(name, p, draw(st.integers(1, 6)))}
    question["chunks"] = chunks_of(name) if SCHEDULES[name].most_chunks is None else 1
    for time_ in TIMES:
        given_ = draw(decimals)
        many = time_ in TIMES[:3] and draw(st.booleans()) and p > 1
        question[time_] = ", ".join(draw(decimals) for _ in range(p)) if many else given_
    question["bandwidth"] = draw(st.sampled_from(["", "2", "1/3"]))
    return question


def numbers(text):
    found = [read_time(part) for part in text.split(", ")]
    return found if len(found) > 1 else found[0]


def simulated(made, question):
    given_ = {name: numbers(question.get(name, USUAL[name])) for name in TIMES}
    rate = question.get("bandwidth")
    return simulate(made, **given_, bandwidth=Fraction(rate) if rate else None)


def assert_drawing_is_right(drawing, simulation):
    for name in ("makespan", "span", "bubble", "span_bubble"):
        assert drawing[name] == float(getattr(simulation, name))
    assert drawing["peak_stash"] == [float(peak) for peak in simulation.peak_stash]
    assert [max(n for _, n in row) for row in drawing["stash"]] == drawing["peak_stash"]
    events = {(e.rank, e.name, float(e.start), float(e.end)) for e in simulation.timeline.events}
    rows = [(r, step) for r, row in enumerate(drawing["rows"]) for step in row]
    long = {(r, s["name"], s["start"], s["end"]) for r, s in rows if s["end"] > s["start"]}
    assert long == events


@given(question=questions())
@settings(max_examples=60, deadline=None)
def test_the_numbers_of_the_page_are_those_of_the_simulator(question):
    found = answer(**question)
    options, rate = {}, question["bandwidth"]
    if question["schedule"] == "zb_auto":
        options = {name: numbers(question[name]) for name in TIMES[:4]}
        options["latency"] += 1 / Fraction(rate) if rate else 0
    made = programs(*(question[name] for name in ("schedule", "p", "m", "chunks")), **options)
    assert found["text"] == program_text(made) and found["grid"] == [
        [str(action) for action in row] for row in made
    ]
    assert found["fault"] is None and found["certificate"]["ok"]
    assert_drawing_is_right(found["drawing"], simulated(made, question))
    json.dumps(found, allow_nan=False)


@given(case=linear_extensions() | any_schedule(), latency=decimals)
@settings(deadline=None)
def test_a_text_of_any_valid_order_is_answered_with_its_own_numbers(case, latency):
    made, p, m = case
    found = answer(text=program_text(made), latency=latency, schedule="gpipe", p=1, m=1)
    assert (found["p"], found["m"], found["placement"]) == (p, m, made.placement)
    assert found["certificate"]["ok"]
    assert_drawing_is_right(found["drawing"], simulated(made, {"latency": latency}))
    if found["csv"]:
        assert answer(text=found["csv"])["grid"] == found["grid"]
    else:
        assert updates(made)


@given(case=linear_extensions(max_p=3, max_m=3), random=st.randoms(use_true_random=False))
@settings(deadline=None)
def test_a_fault_is_the_validators_own_sentence_and_its_place(case, random):
    made, p, _ = case
    rows = [list(row) for row in made]
    row = random.choice(rows)
    match random.choice(["drop", "double", "swap"]):
        case "drop":
            del row[random.randrange(len(row))]
        case "double":
            row.insert(random.randrange(len(row)), random.choice(row))
        case "swap":
            i, j = random.randrange(len(row)), random.randrange(len(row))
            row[i], row[j] = row[j], row[i]
    head = program_text(made).partition("\n")[0]
    body = "\n".join(f"rank {r} " + " ".join(map(str, row)) for r, row in enumerate(rows))
    found = answer(text=f"{head}\n{body}")
    changed = read(f"{head}\n{body}")
    try:
        validate(changed, p, found["m"])
    except ValueError as error:
        assert found["drawing"] is None and found["certificate"] is None
        fault = found["fault"]
        assert as_text(found) == str(error) and fault["message"] == str(error).partition("\n")[0]
        if fault["rank"] is not None:
            start = f"rank {fault['rank']}, action {fault['at']}: "
            assert fault["message"].startswith(start)
        assert found["grid"] == [[str(action) for action in row] for row in rows]
    else:
        assert found["fault"] is None and found["certificate"]["ok"]


def test_a_word_that_is_no_action_has_a_line_and_a_column():
    found = answer(text="# mine\nrank 0 F0 X0 B0")
    assert found["fault"] == {
        "message": "the text, line 2, column 11: 'X0' is no action; write them as F3 B3 I3 W3 U3 "
        "R F3.1, with spaces",
        "rank": None,
        "at": None,
        "line": 2,
        "column": 11,
    }


def test_a_text_is_never_the_name_of_a_file(tmp_path, monkeypatch):
    (tmp_path / "mine").write_text("rank 0 F0 B0")
    monkeypatch.chdir(tmp_path)
    assert answer(text="mine")["fault"]["line"] == 1
    assert "root" not in json.dumps(answer(text="/etc/passwd"))


def test_the_limit_names_the_ranks_that_exceed_it():
    assert answer(**FIRST, limit="2")["drawing"]["over"] == [0, 1]
    assert answer(**FIRST, limit="4")["drawing"]["over"] == []
    zb_auto = answer(schedule="zb_auto", p=4, m=8, limit="2")["drawing"]
    assert zb_auto["over"] == [] and max(zb_auto["peak_stash"]) == 2


REFUSED = [  # a question, and what it is answered
    ({"p": 65}, "at most 64 ranks, not 65"),
    ({"m": "8"}, "one or more micro-batches, not '8'"),
    ({"p": 4, "m": 2501}, "at most 20,000 actions, not 20008"),
    ({"schedule": "1f2b"}, "did you mean 1f1b?"),
    ({"schedule": "interleaved", "p": 4, "m": 6, "chunks": 2}, "groups of 4"),
    ({"forward": "1 2"}, "2 durations for 4 ranks"),
    ({"latency": "1e99"}, "'1e99' is not a time"),
    ({"bandwidth": "0"}, "more than 0 transfers per unit, not 0"),
    ({"limit": "many"}, "'many' is not a time"),
    ({"replicas": "2 2"}, "1f1b has no option 'replicas'"),
    ({"durations": "1"}, "unknown field 'durations'"),
    ({"text": "rank 0 F0 B0", "forward": "x"}, "'x' is not a time"),
]
FAULTS = [  # a text that is too large or odd
    ("rank 0 " + "F0 " * 20_000, "at most 20,000 actions, not 20001"),
    ("\n".join(f"rank {r} F0 B0" for r in range(65)), "at most 64 ranks, not 65"),
    ("rank 0 F0 " + " " * 200_000, "at most 200,000 characters, not 200010"),
    ("rank 0 F0 F0.999999999", "more than 1000000 stages"),
    ("placement 999999999\nrank 0 F0 B0", "no rank holds stage 0"),
    ("rank 7 F0", "rank 0 has no line"),
    ("rank 0 F0 F1 B1 B0\nrank 1 F0 B0 F1 B1\nrank 2 F1 B1 F0 B0", "action 2: deadlock: all"),
    ("\ud800", "is no action"),
    (" ", "is empty"),
]


def test_wrong_numbers_and_texts_get_a_sentence():
    for question, words in REFUSED:
        assert words in answers.answer({"page": "schedules", **question})["error"]
    for text, words in FAULTS:
        found = answer(text=text)
        assert words in found["fault"]["message"] and found["drawing"] is None
        json.dumps(found)


@given(text=st.text(max_size=40) | st.text("FBIWRU0123. ()|\n\trankplceom,;:#", max_size=40))
@settings(max_examples=100, deadline=None)
def test_no_text_at_all_raises(text):
    found = answer(text=text)
    assert text == "" or set(found) >= {"text", "grid", "fault", "drawing", "certificate", "words"}
    json.dumps(found, allow_nan=False)


def test_every_schedule_is_offered_and_certified():
    for name, schedule in SCHEDULES.items():
        found = answer(schedule=name, p=2, m=4)
        assert found["certificate"]["ok"]
        assert as_text(found).endswith(found["certificate"]["words"] + "\n")
        assert (found["csv"] is None) == schedule.asynchronous
        assert ("not those of one device" in as_text(found)) == schedule.asynchronous
    assert "makespan 33, of which 27.3% are idle" in as_text(answer(**FIRST))


def test_the_options_of_schedules_are_offered():
    late = answer(schedule="1f1b", p=2, m=2, weights_last="yes")
    assert late["grid"][1] == ["F0", "I0", "F1", "I1", "W0", "W1"]
    two = answer(schedule="pipedream", p=3, m=4, replicas="2 1")
    assert two["placement"] == [[0], [0], [1]] and two["certificate"]["ok"]
    assert answer(schedule="pipedream", p=1, m=2, replicas="1")["stages"] == 1
    every = answer(schedule="pipedream_2bw", p=2, m=4, update_every="2")
    assert every["grid"][0].count("U1") == 1


def par_of(puzzle):
    """Return the makespans of the schedules that keep to a puzzle's limit and chunks."""
    names = "p", "m", *TIMES[:4], "limit"
    question, found = {name: puzzle[name] for name in names}, {}
    for name, (_, most, asynchronous, _) in SCHEDULES.items():
        if asynchronous or (most or 2) > puzzle["chunks"] or name == "layer_split":
            continue
        try:
            chunks = 2 if most is None else 1
            drawing = answer(schedule=name, chunks=chunks, **question)["drawing"]
        except ValueError:  # not for these p and m
            continue
        if not drawing["over"]:
            found[name] = drawing["makespan"]
    return found


def test_the_par_of_a_puzzle_is_what_the_schedules_reach_and_none_begins_solved():
    for puzzle in PUZZLES:
        assert puzzle["par"] == par_of(puzzle) and "zb_auto" in puzzle["par"]
        names = "p", "m", *TIMES[:4], "limit"
        begin = answer(schedule=puzzle["start"], **{name: puzzle[name] for name in names})
        assert begin["drawing"]["makespan"] > min(puzzle["par"].values())
        assert begin["drawing"]["over"] == [] and begin["chunks"] <= puzzle["chunks"]


def test_a_field_that_is_no_text_is_read_or_refused():
    for field in [*TIMES, "bandwidth", "limit", "size", "replicas"]:
        for value in (0, False, [], {"a": 1}, [1], None, 1e999, -1, "1e9"):
            found = answers.answer({"page": "schedules", field: value})
            assert "error" in found or found["drawing"], (field, value)
