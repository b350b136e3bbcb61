"""Numbers in words, from training to `minidist translate`."""

import io
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from minidist import decoding, translating
from minidist.checkpoint import Keep
from minidist.cli import main
from minidist.datasets import Text, numbers
from minidist.datasets.number_words import in_chinese, in_english
from minidist.datasets.pairs import DIRECTIONS
from minidist.kinds import NUMBERS, numbers_of
from minidist.tokens import END, PAD
from minidist.train import Settings, told, train
from minidist.translating import Translation, load, of_held_out, translate
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
    pytest.importorskip("safetensors", reason="checkpoints need the package safetensors")
    cluster(1, "thread").run(train, data, replace(SMALL, steps=1), Keep(str(tmp_path / "saved")))
    return str(tmp_path / "saved")


def refused(capsys, *arguments):
    assert main([*arguments]) == 2
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert printed.out == ""
    return line.removeprefix("minidist: ")


@pytest.mark.parametrize("direction, by", [("zh-en", "words"), ("en-zh", "characters")])
def test_training_says_how_many_held_out_numbers_are_right(capsys, direction, by):
    more = f"--steps 3 --dropout 0.1 --direction {direction} --by {by} --sample 2"
    assert main([*COMMAND, *more.split()]) == 0
    out = capsys.readouterr().out
    assert f"numbers, {direction} by {by}: 20,000 to train on, 2,000 held out; " in out
    assert "2 ranks, each with its part of every batch of 8 pairs" in out
    assert re.search(rf"loss \d\.\d+ -> \d\.\d+ nats/{by[:-1]}\n", out)
    found = re.search(
        r"\nexactly right: ([\d,]+) of 2,000 held-out numbers \((\S+)%\)\n((  .* -> .*\n)*)", out
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


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--context 8", "context is a setting of texts, not of numbers; leave it out"),
        ("--tied", "tied is a setting of texts, not of numbers"),
        ("--experts 2", "experts is a setting of texts, not of numbers"),
        ("--ranks 2 --cp 2", "cp is a setting of texts, not of numbers"),
        ("--ep 2 --experts 2", "experts is a setting of texts, not of numbers"),
        ("--text x", "--data numbers learns pairs, not the file of --text; leave one of the two"),
        ("--batch 20001", "numbers, en-zh by words: 20000 pairs are fewer than a batch of 20001"),
        ("--data text --by words", "--by is an option of --data numbers; leave it out"),
        ("--data digits --direction en-zh", "--direction is an option of --data numbers; leave"),
    ],
)
def test_what_numbers_do_not_have_is_refused(capsys, arguments, message):
    command = "train --data numbers --transport thread"
    assert refused(capsys, *command.split(), *arguments.split()).startswith(message)


def test_what_is_told_makes_the_same_model_and_reads_the_same_texts(data):
    for each in (data, data.reversed(), numbers("zh-en", "characters", examples=9, held_out=9)):
        again = numbers_of(json.loads(json.dumps(told(each, SMALL)))["data"])
        assert (again.source, again.target) == (each.source, each.target)
        shapes = [
            {n: p.shape for n, p in NUMBERS.model(d, SMALL).named_parameters().items()}
            for d in (each, again)
        ]
        assert shapes[0] == shapes[1]
        text = each.source.decode(each.held_out[0][0, : each.source_length])
        np.testing.assert_array_equal(again.encode(text), each.encode(text))
        assert again.decode(each.held_out[1][0]) == each.decode(each.held_out[1][0])


def test_other_numbers_are_told_from_these(data):
    one, *others = (
        NUMBERS.told(d)
        for d in (data, data.reversed(), numbers(examples=60, held_out=7, seed=1))
    )  # fmt: skip
    assert all(one != other for other in others)


def test_a_run_that_went_on_is_the_run_that_was_never_interrupted(cluster, data, tmp_path):
    pytest.importorskip("safetensors", reason="checkpoints need the package safetensors")
    keep = Keep(str(tmp_path), every=3)
    settings = replace(SMALL, dp=2)
    (losses, state), _ = cluster(2, "thread").run(train, data, settings, keep)
    shutil.rmtree(tmp_path / "step-00000006")
    again = cluster(2, "thread").run(train, data, settings, replace(keep, resume=True))
    for found, weights in again:
        assert found == losses
        assert_same_bits(weights, state)


def test_a_run_does_not_go_on_with_other_numbers(capsys, tmp_path):
    pytest.importorskip("safetensors", reason="checkpoints need the package safetensors")
    command = [*COMMAND, "--steps", "1", "--sample", "0", "--checkpoint", str(tmp_path)]
    assert main(command) == 0
    capsys.readouterr()
    line = refused(capsys, *command, "--resume", "--direction", "zh-en")
    assert line == (
        "the checkpoint is of a run on numbers, en-zh by words, not on numbers, zh-en by words; "
        "give it the same, or another folder"
    )
    assert main([*command, "--resume", "--steps", "2"]) == 0
    assert "goes on after step 1, " in capsys.readouterr().out


def test_a_deeper_model_begins_where_the_shallower_one_ended(cluster, data, tmp_path):
    """Its new blocks add nothing, on both sides; the same 60 examples are in every batch."""
    pytest.importorskip("safetensors", reason="checkpoints need the package safetensors")
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
    exact, translations = of_held_out(SMALL.model(data), data)
    assert exact.tolist() == [True, False, False, False, True, True, True]
    assert [t.written == t.right for t in translations] == [True, False, *[True] * 5]
    assert "  (wrong: it is " in str(translations[1]) and "(" not in str(translations[0])


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_number_is_judged_by_the_rules(direction, data, writes):
    data = data if direction == "en-zh" else data.reversed()
    source, target = (in_english, in_chinese)[:: 1 if direction == "en-zh" else -1]
    model, writes.data = SMALL.model(data), data
    writes(target(1021))
    for text in (source(1021), "1021", "001021", f"  {source(1021)} \n"):
        found = translate(model, data, text)
        assert found == Translation(source(1021), target(1021), target(1021))
    wrong = translate(model, data, "1022")
    assert str(wrong) == f"{source(1022)} -> {target(1021)}  (wrong: it is {target(1022)})"


def test_what_is_no_number_is_translated_and_not_judged(data, writes):
    writes.data = data
    writes("")
    assert str(translate(SMALL.model(data), data, "2")) == "two -> (nothing)  (wrong: it is 二)"
    writes("二")
    assert str(translate(SMALL.model(data), data, "one one")) == "one one -> 二"


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


@pytest.mark.parametrize(
    "text, message",
    [
        ("one dozen", "the word 'dozen' of 'one dozen' is none of the 32 that numbers are written"),
        ("三", "the word '三' of '三' is none of the 32"),
        ("", "there is nothing to translate in an empty text; write a number"),
        (" \n", "there is nothing to translate in an empty text"),
        ("100000000", "100000000 has no words here; use a whole number from 0 to 99999999"),
        ("one " * 16, f"'{' '.join(['one'] * 16)}' has 16 tokens, and the longest number 15"),
    ],
)
def test_a_text_that_it_cannot_read_is_one_line(capsys, folder, text, message):
    assert refused(capsys, "translate", "--checkpoint", folder, text).startswith(message)


def test_a_folder_without_a_translator_is_one_line(capsys, tmp_path, cluster):
    pytest.importorskip("safetensors", reason="checkpoints need the package safetensors")
    command = ["translate", "one", "--checkpoint", str(tmp_path)]
    remedy = "make one with `minidist train --data numbers --checkpoint FOLDER`"
    assert refused(capsys, *command) == f"{tmp_path} has no checkpoint; {remedy}"
    text = Text(np.arange(80) % 5, "abcde", "five characters")
    settings = replace(SMALL, steps=1, context=8)
    cluster(1, "thread").run(train, text, settings, Keep(str(tmp_path)))
    line = refused(capsys, *command)
    assert line.endswith(f"step-00000001 is of five characters, and cannot translate; {remedy}")


@pytest.mark.parametrize(
    "mesh",
    [{}, {"dp": 2, "zero": 1}, {"pp": 2, "tp": 2}, {"precision": "float16"}],
    ids=str,
)
def test_the_model_is_loaded_from_any_mesh(cluster, data, tmp_path, mesh):
    pytest.importorskip("safetensors", reason="checkpoints need the package safetensors")
    settings = replace(SMALL, **mesh)
    results = cluster(settings.ranks, "thread").run(train, data, settings, Keep(str(tmp_path)))
    model, again = load(str(tmp_path))
    state, weights = model.state(), results[0][1]
    assert_same_bits({name: w.astype(weights[name].dtype) for name, w in state.items()}, weights)
    texts = [
        decoding.translate(model, d.encode("nine hundred seven")).tolist() for d in (data, again)
    ]
    assert texts[0] == texts[1]


def test_a_damaged_checkpoint_is_one_line(capsys, folder):
    (file,) = Path(folder).glob("step-*/*.safetensors")
    content = bytearray(file.read_bytes())
    begin = 8 + int.from_bytes(content[:8], "little")  # after the header
    file.write_bytes(content[:begin] + bytes(byte ^ 1 for byte in content[begin:]))
    line = refused(capsys, "translate", "one", "--checkpoint", folder)
    assert "is damaged: the checksum of" in line
