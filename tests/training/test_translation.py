"""Numbers in words, from training to `minidist translate`."""

import io
import json
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest

from minidist.checkpoint import Keep
from minidist.cli import main
from minidist.nn import generate as decoding
from minidist.nn.datasets import Text, numbers
from minidist.nn.datasets.pairs import DIRECTIONS, LANGUAGES, in_chinese, in_english
from minidist.nn.embedding import END, PAD
from minidist.training import translation as translating
from minidist.training.kinds import NUMBERS, load, model_of, numbers_of
from minidist.training.loop import train
from minidist.training.presets import PRESETS, chosen
from minidist.training.settings import Settings
from minidist.training.setup import description
from minidist.training.translation import (
    READ,
    Translation,
    half_for,
    of_held_out,
    of_round_trip,
    translate,
)
from tests.strategies import assert_same_bits

SMALL = Settings(steps=6, batch=8, width=8, heads=2, depth=1, dropout=0.1, micro_batches=2)
COMMAND = "train --data numbers --transport thread --ranks 2 --width 8 --depth 1 --batch 8".split()


@pytest.fixture(scope="module")
def data():
    return numbers(examples=60, held_out=7)


@pytest.fixture
def writes(monkeypatch):
    """Let any model write a text that it is told: what it would, had it learnt enough."""

    def tell(text):
        def written(model, sources, beam=1):
            rows = []
            for _ in sources:
                tokens = [*tell.data.target.encode(text), END]
                rows.append(np.pad(tokens, (0, model.target_length - len(tokens))))
            return np.array(rows)

        monkeypatch.setattr(decoding, "translate", written)

    return tell


@pytest.fixture
def folder(tmp_path, cluster, data):
    """Return a folder with a checkpoint of a few steps."""
    cluster(1, "thread").run(train, data, replace(SMALL, steps=1), Keep(str(tmp_path / "saved")))
    return str(tmp_path / "saved")


def refused(capsys, *arguments):
    capsys.readouterr()  # the steps of a checkpoint's training
    assert main([*arguments]) == 2
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert printed.out == ""
    return line.removeprefix("minidist: ")


def test_training_says_how_many_held_out_numbers_are_right(capsys):
    direction, by = "en-zh", "characters"
    more = f"--steps 3 --dropout 0.1 --direction {direction} --by {by} --sample 2"
    assert main([*COMMAND, *more.split()]) == 0
    out = capsys.readouterr().out
    assert f"numbers, {direction} by {by}: 20,000 to train on, 2,000 held out; " in out
    assert "2 ranks, each with its part of every batch of 8 pairs" in out
    assert re.search(rf"loss \d\.\d+ -> \d\.\d+ nats/{by[:-1]}\n", out)
    found = re.search(
        r"\nexactly right: ([\d,]+) of 2,000 held-out numbers \((\S+)%\), "
        + direction
        + r"\n((  .* -> .*\n)*)",
        out,
    )
    assert int(found[1].replace(",", "")) / 20 == pytest.approx(float(found[2]))
    assert len(found[3].splitlines()) == 2
    last = "certificate: ok. 2 ranks against one device, in float64, all 43 parameters, 5 pairs"
    assert last in out.splitlines()[-2]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_defaults_translate_99_percent_of_what_they_have_not_seen(capsys, tmp_path, direction):
    saved = ["--checkpoint", str(tmp_path / "saved")]
    assert main(["train", "--data", "numbers", "--direction", direction, *saved]) == 0
    out = capsys.readouterr().out
    assert float(re.search(r"held-out numbers \((\S+)%\)", out)[1]) >= 99
    assert main(["translate", *saved, "321", "4070", "10203040"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and sum(line.endswith("  (right)") for line in lines) >= 2


def test_what_is_told_makes_the_same_model_and_reads_the_same_texts(data):
    for each in (data, data.reversed(), numbers("zh-en", "characters", examples=9, held_out=9)):
        again = numbers_of(json.loads(json.dumps(description(each, SMALL)))["data"])
        assert (again.source, again.target) == (each.source, each.target)
        shapes = [
            {n: p.shape for n, p in NUMBERS.model(d, SMALL).named_parameters().items()}
            for d in (each, again)
        ]
        assert shapes[0] == shapes[1]
        text = each.source.decode(each.held_out[0][0, : each.source_length])
        np.testing.assert_array_equal(again.encode(text), each.encode(text))
        assert again.decode(each.held_out[1][0]) == each.decode(each.held_out[1][0])


def test_two_translators_go_on_as_if_they_had_never_been_interrupted(cluster, data, tmp_path):
    keep = Keep(str(tmp_path), every=3)
    settings = replace(SMALL, dp=2, reconstruction=0.5)
    (losses, state), _ = cluster(2, "thread").run(train, data, settings, keep)
    shutil.rmtree(tmp_path / "step-00000006")
    again = cluster(2, "thread").run(train, data, settings, replace(keep, resume=True))
    for found, weights in again:
        assert found == losses
        assert_same_bits(weights, state)


EVERYDAY = ["zero_1", "hybrid"]


@pytest.mark.parametrize(
    "name",
    [
        name if name in EVERYDAY else pytest.param(name, marks=pytest.mark.slow)
        for name in PRESETS
        if name != "downpour"
    ],
)
def test_every_mesh_translates_what_one_rank_translates(cluster, data, name):
    """The losses of a run are those of one rank, to rounding in float32."""
    settings = replace(SMALL, steps=4, batch=16, depth=2, heads=4)
    (want, weights), *_ = cluster(1, "thread").run(train, data, settings)
    results = cluster(4, "thread").run(train, data, replace(settings, **chosen(name, 4, {})))
    for losses, state in results:
        np.testing.assert_allclose(losses, want, rtol=1e-5)
        assert state.keys() == weights.keys()
    assert want[-1] < want[0]


def test_a_deeper_model_begins_where_the_shallower_one_ended(cluster, data, tmp_path):
    """Its new blocks add nothing, on both sides; the same 60 examples are in every batch."""
    settings, keep = replace(SMALL, batch=60, dropout=0.0), Keep(str(tmp_path))
    shallow = replace(settings, lr=0.0)
    (losses, _), *_ = cluster(1, "thread").run(train, data, shallow, keep)
    deep = replace(shallow, depth=2, pp=2)
    (grown, state), *_ = cluster(2, "thread").run(train, data, deep, replace(keep, resume=True))
    np.testing.assert_allclose(grown, losses, rtol=1e-5)
    assert "decoder.1.cross.query.weight" in state


def test_a_target_counts_if_every_word_and_the_end_are_right(data, monkeypatch):
    right = np.where(data.held_out[1] < 0, PAD, data.held_out[1])
    ends = (right == END).argmax(axis=1)
    written = right.copy()
    written[1, 0] = 5 + (right[1, 0] == 5)
    written[2, ends[2]] = PAD  # the same words, and no end
    written[3, ends[3] + 1] = 7  # after the end
    parts = iter(np.array_split(written, 3))
    monkeypatch.setattr(translating, "AT_ONCE", 3)
    monkeypatch.setattr(decoding, "translate", lambda model, sources: next(parts))
    exact, translations = of_held_out(model_of(data, SMALL), data)
    assert exact.tolist() == [True, False, False, False, True, True, True]
    assert [t.written == t.right for t in translations] == [True, False, *[True] * 5]
    assert "  (wrong: it is " in str(translations[1]) and "(" not in str(translations[0])


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_number_is_judged_by_the_rules(direction, data, writes):
    data = data if direction == "en-zh" else data.reversed()
    source, target = (in_english, in_chinese)[:: 1 if direction == "en-zh" else -1]
    model, writes.data = model_of(data, SMALL), data
    writes(target(1021))
    for text in (source(1021), "1021", "001021", f"  {source(1021)} \n"):
        found = translate(model, data, text)
        assert found == Translation(source(1021), target(1021), target(1021))
    wrong = translate(model, data, "1022")
    assert str(wrong) == f"{source(1022)} -> {target(1021)}  (wrong: it is {target(1022)})"


@pytest.mark.parametrize("by", ["words", "characters"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_translator_that_knows_more_of_the_words_reads_them(direction, by):
    data = numbers(direction, by, examples=9, held_out=9)
    model = model_of(data, replace(SMALL, reconstruction=1.0))
    for text, reads in (
        ("two hundred", "en"),
        ("一百", "zh"),
        ("two hundred 二", "en"),
        ("二百x", "zh"),
    ):
        half, own = half_for(model, data, text)
        assert own.direction.startswith(reads)
        assert half is (model.there if own.direction == direction else model.back)
        assert half.source_length == own.source_length and half.vocab == len(own.target)
    assert half_for(model, data, "?")[0] is model.there


def test_a_source_comes_back_if_both_translators_are_right_or_their_mistakes_cancel(
    data, monkeypatch
):
    """Both write by the rules, but some numbers, by their place, one too high or one too low."""
    model = model_of(data, replace(SMALL, reconstruction=0.5))
    back, wrong = data.reversed(), {"there": (1, 2, 3), "back": (3, 4)}

    def written(translator, sources):
        own, name, more = (data, "there", 1) if translator is model.there else (back, "back", -1)
        reads, writes = own.direction.split("-")
        rows = np.zeros((len(sources), translator.target_length), np.int64)
        for i, source in enumerate(sources):
            number = READ[reads](own.source.decode(source)) + more * (i in wrong[name])
            tokens = own.target.encode(LANGUAGES[writes][0](number))
            rows[i, : len(tokens)], rows[i, len(tokens)] = tokens, END
        if name == "back":
            rows[5][rows[5] == END] = PAD  # the same words, and no end
        return rows

    monkeypatch.setattr(decoding, "translate", written)
    assert of_round_trip(model, data).tolist() == [True, False, False, True, False, False, True]


def test_the_command_prints_a_line_per_text(capsys, folder, data, writes):
    writes.data = data
    writes("三百二十一")
    texts = ["321", "three hundred twenty-one", "twenty", "one one"]
    assert main(["translate", "--checkpoint", folder, *texts]) == 0
    assert capsys.readouterr().out.splitlines() == [
        *["three hundred twenty-one -> 三百二十一  (right)"] * 2,
        "twenty -> 三百二十一  (wrong: it is 二十)",
        "one one -> 三百二十一",
    ]


def test_without_a_text_it_translates_the_lines_it_reads(capsys, folder, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("seven\n\n 8 \n"))
    assert main(["translate", "--checkpoint", folder, "--beam", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" -> ")[0] for line in lines] == ["seven", "eight"]


def test_a_text_that_it_cannot_read_is_one_line(capsys, folder):
    for text, message in [
        ("one dozen", "the word 'dozen' of 'one dozen' is none of the 32 that numbers are written"),
        (" \n", "there is nothing to translate in an empty text; write a number"),
        ("9" * 5000, "a number of 5000 digits has no words here; use 8 or fewer"),
        ("one " * 99, f"'{' '.join(['one'] * 99)[:77]}'... has 99 tokens"),
        ("one " * 16, f"'{' '.join(['one'] * 16)}' has 16 tokens, and the longest number 15"),
    ]:
        said = refused(capsys, "translate", "--checkpoint", folder, text)
        assert said.startswith(message)


def test_a_folder_without_a_translator_is_one_line(capsys, tmp_path, cluster):
    command = ["translate", "one", "--checkpoint", str(tmp_path)]
    remedy = "make one with `minidist train --data numbers --checkpoint FOLDER`"
    assert refused(capsys, *command) == f"{tmp_path} has no checkpoint; {remedy}"
    nowhere = "'' is no folder; the one where you are is '.'"
    assert refused(capsys, *command[:-1], "") == nowhere
    text = Text(np.arange(80) % 5, "abcde", "five characters")
    settings = replace(SMALL, steps=1, context=8)
    cluster(1, "thread").run(train, text, settings, Keep(str(tmp_path)))
    line = refused(capsys, *command)
    assert line.endswith(f"step-00000001 is of five characters, and cannot translate; {remedy}")


@pytest.mark.parametrize(
    "mesh", [{"dp": 2, "zero": 1}, {"pp": 2, "tp": 2, "precision": "float16"}], ids=str
)
def test_the_model_is_loaded_from_any_mesh(cluster, data, tmp_path, mesh):
    settings = replace(SMALL, **mesh)
    results = cluster(settings.ranks, "thread").run(train, data, settings, Keep(str(tmp_path)))
    model, again = load(str(tmp_path))
    state, weights = model.state(), results[0][1]
    assert_same_bits({name: w.astype(weights[name].dtype) for name, w in state.items()}, weights)
    texts = [
        decoding.translate(model, d.encode("nine hundred seven")).tolist() for d in (data, again)
    ]
    assert texts[0] == texts[1]
