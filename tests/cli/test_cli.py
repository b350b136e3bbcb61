"""The command line as a user meets it."""

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from minidist import cli, optim
from minidist.backend import why_no_gpu
from minidist.cli import main
from minidist.cli.train import TrainCommand
from minidist.comm import run
from minidist.observe import style, timeline
from minidist.observe.bench import steps
from minidist.observe.bench.table import line as row_as_text
from minidist.pipeline_parallel import SCHEDULES, programs, read, write
from minidist.planning import simulate
from minidist.training.kinds import NUMBERS
from minidist.training.presets import ALONE, PRESETS, chosen, mesh_of
from minidist.training.settings import OF_SERVERS, Settings
from minidist.verify import certificate, equivalence
from minidist.verify.certificate import replay
from minidist.verify.strategies import STRATEGIES
from tests.chrome_traces import check_chrome_trace
from tests.comm.test_cluster import group_gone

TINY = ["--steps", "3", "--batch", "6", "--context", "8", "--width", "8", "--heads", "2"]
TINY += ["--depth", "1", "--sample", "20"]
slow = pytest.mark.slow


@pytest.fixture(autouse=True)
def terminal(monkeypatch):
    """Let pictures be as wide as without a terminal, wherever the tests run."""
    monkeypatch.setenv("COLUMNS", "100")


def minidist(*arguments, **options):
    command = [sys.executable, "-W", "error", "-m", "minidist", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, **options)


def test_train_prints_losses_the_bigram_entropy_a_sample_and_the_certificate():
    done = minidist("train", *TINY)
    assert done.returncode == 0
    lines = [line.split(":")[0] for line in done.stderr.splitlines()]
    assert lines == ["step 1 of 3", "step 2 of 3", "step 3 of 3"]
    assert re.search(r"loss \d\.\d+ -> \d\.\d+ nats/character", done.stdout)
    assert re.search(r"bigram entropy of the text: 2\.\d+ nats/character", done.stdout)
    assert (
        "certificate: ok. 4 ranks against one device, in float64, all 17 parameters, 9"
        in done.stdout
    )
    assert float(re.search(r"largest gradient difference (\S+);", done.stdout).group(1)) < 1e-9


def test_train_plots_loss_and_learning_rate(capsys, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="figures need matplotlib")
    drawn = []
    monkeypatch.setattr(style.pyplot(), "close", drawn.append)
    path = tmp_path / "run.png"
    assert main(["train", "--transport", "thread", "--ranks", "2", *TINY, "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert f"loss and learning rate: {path}\n" in capsys.readouterr().out
    (figure,) = drawn
    labels = [axes.get_ylabel() for axes in figure.axes]
    assert labels == ["loss (nats per character)", "learning rate"]
    assert figure.axes[-1].get_xlabel() == "step"
    assert all(len(axes.lines[0].get_xdata()) == 3 for axes in figure.axes)


def test_a_file_that_cannot_be_written_is_refused_before_training(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("minidist.cli.train.run_on_ranks", None)
    missing = "No such file or directory; use a folder of yours"
    for more, error in [
        ("--plot run.txt", "a plot is a file *.png, *.pdf, *.svg, not 'run.txt'"),
        ("--plot no/run.png", "cannot write 'no/run.png': there is no folder 'no'"),
        ("--plot run.png", "the figures need matplotlib: pip install 'minidist[lessons]'"),
        ("--checkpoint /proc/a", f"cannot write to the folder /proc/a: {missing}"),
        (
            "--checkpoint /proc/a --servers 1 --ranks 2",
            f"cannot write to the folder /proc/a: {missing}",
        ),
    ]:
        assert main(["train", "--transport", "thread", *TINY, *more.split()]) == 2
        assert capsys.readouterr().err == f"minidist: {error}\n"


def test_train_learns_a_file(capsys, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("Die Wörter, die wir lernen. " * 200, encoding="utf-8")
    arguments = ["--ranks", "2", "--transport", "thread", "--steps", "40", "--width", "32"]
    arguments += ["--text", str(path), "--context", "16", "--sample", "0"]
    assert main(["train", *arguments, "--dropout", "0.1", "--tied"]) == 0
    printed = capsys.readouterr().out
    assert f"{path}: 5,600 characters" in printed
    first, last = re.search(r"loss (\S+) -> (\S+) nats", printed).groups()
    assert float(last) < 2 < 2.5 < float(first)


DIGITS = ["train", "--data", "digits", "--transport", "thread"]


def test_train_learns_digits_with_synchronised_batch_norms(capsys):
    assert main([*DIGITS, "--ranks", "2", "--steps", "30"]) == 0
    out = capsys.readouterr().out
    assert "handwritten digits: 1,500 to train on, 297 held out" in out
    right = re.search(r"accuracy on 297 images that are held out: (\S+)%", out).group(1)
    assert float(right) > 40
    assert "certificate: ok. 2 ranks against one device, in float64, all 32 parameters, 5" in out


def test_a_progress_bar_shows_in_a_terminal():
    pty, termios = pytest.importorskip("pty"), pytest.importorskip("termios")
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    command = [sys.executable, "-m", "minidist", "train", *TINY]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=theirs)
    os.close(theirs)
    shown = b""
    while True:
        try:
            shown += os.read(ours, 4096)
        except OSError:  # the terminal closes with its last user
            break
    assert process.wait(timeout=60) == 0
    os.close(ours)
    assert b"3/3" in shown and b"loss=" in shown


ON_MESHES = [  # options of the model, the mesh, its ranks, and how the command shows it
    (
        "--tied --dropout 0.1",
        "--dp 2 --pp 2 --tp 2 --zero 0",
        8,
        "2 x 2 x 2 (data, pipeline, tensor), for",
    ),
    (
        "--model llama --kv-heads 1 --optimizer muon",
        "--dp 2 --pp 2 --zero 1",
        4,
        "2 x 2 x 1 (data, pipeline, tensor), ZeRO stage 1, for",
    ),
    (
        "--tied --experts 4 --dropout 0.1",
        "--dp 2 --cp 2 --tp 2 --ep 2 --zero 1",
        8,
        "2 x 1 x 2 x 2 (data, pipeline, context, tensor), experts over 2, ZeRO stage 1, for",
    ),
]


@pytest.mark.parametrize("model, mesh, ranks, shown", ON_MESHES)
def test_train_on_a_mesh_learns_what_one_rank_learns(capsys, model, mesh, ranks, shown):
    """The losses, the text's model and the certificate."""
    outputs = []
    for own in ("--ranks 1", mesh):
        more = f"--transport thread --batch 3 --micro-batches 2 {model} {own}"
        assert main(["train", *TINY, *more.split()]) == 0
        outputs.append(capsys.readouterr().out)
    assert f"{ranks} ranks, {shown} batches of 3 windows" in outputs[1]
    assert f"certificate: ok. {ranks} ranks against one device" in outputs[1]
    one, mesh = (re.search(r"loss .* nats/character\n.*\n\n(.|\n)*\n\n", o) for o in outputs)
    assert one.group() == mesh.group()


@pytest.mark.parametrize("more", [["--sparse"], ["--quorum", "2"]])
def test_train_with_servers_replays_certifies_and_saves(capsys, tmp_path, more):
    folder = str(tmp_path / "run")
    arguments = ["train", "--transport", "thread", *TINY, "--checkpoint", folder]
    assert main([*arguments, "--servers", "2", "--replay", *more]) == 0
    printed = capsys.readouterr().out
    for pattern in (
        "4 ranks, 2 of them servers, the others each with a part of every batch of 6 windows",
        r"pulled \S+ MB, pushed \S+ MB; staleness \S+ updates on average, \d+ at most",
        "replay of the servers' logs: the same bits in all 17 arrays",
        "certificate: ok. 4 ranks against one device",
    ):
        assert re.search(pattern, printed), printed
    goes_on = main([*arguments, "--steps", "4", "--resume"])
    assert goes_on == (2 if "--sparse" in more else 0), capsys.readouterr()
    if goes_on:
        assert "has the state of Adagrad, not of AdamW" in capsys.readouterr().err


def test_a_replay_with_another_bit_is_named(monkeypatch):
    def other(group, *given):
        want = replay(group, *given)
        if want is not None:
            bias = want["head.norm.bias"].view(np.uint32)
            bias[-1] ^= 1
        return want

    monkeypatch.setattr("minidist.verify.certificate.replay", other)
    arguments = ["train", "--transport", "thread", *TINY, "--servers", "2", "--replay"]
    with pytest.raises(RuntimeError, match=r"other bits in \['head.norm.bias'\]"):
        main(arguments)


@pytest.mark.parametrize(
    "command, file, function",
    [
        ("train --steps 2", "data_parallel/naive.py", "all_reduce_gradients"),  # on a rank
        ("lab list", "course/lab.py", "labs"),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in [
                ("verify --strategy naive", "verify/equivalence.py", "verify"),
                ("timeline --measured --pp 2", "pipeline_parallel/executor.py", "execute"),
                ("plan --profile", "observe/profile.py", "profile_and_run"),
            ]
        ),
    ],
)
def test_what_numpy_refuses_is_our_bug_and_keeps_its_traceback(tmp_path, command, file, function):
    """In the command's process and in a rank: a planted error of operands that do not fit."""
    shutil.copytree(Path(cli.__file__).parents[1], tmp_path / "minidist")
    with open(tmp_path / "minidist" / file, "a", encoding="utf-8") as source:
        source.write(
            f"\n\ndef {function}(*_, **__):\n    import numpy\n    numpy.ones(3) + numpy.ones(4)\n"
        )
    done = minidist(*command.split(), cwd=tmp_path, env={**os.environ, "PYTHONPATH": "."})
    assert done.returncode == 1
    assert "Traceback (most recent call last)" in done.stderr
    assert "    numpy.ones(3) + numpy.ones(4)\n" in done.stderr
    assert "ValueError: operands could not be broadcast together" in done.stderr
    assert "minidist: operands" not in done.stderr and "operands" not in done.stdout


@pytest.mark.parametrize("where", ["model_of", "train"])  # in the command's process, on a rank
def test_a_model_that_no_memory_can_hold_is_one_line(capsys, monkeypatch, where):
    def huge(*_):
        np.empty(1 << 46)

    monkeypatch.setattr(f"minidist.cli.train.{where}", huge)
    assert main(["train", "--transport", "thread", *TINY]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("minidist: not enough memory: ") and "use smaller sizes" in line


def test_debug_shows_the_traceback_of_wrong_input(capsys, monkeypatch):
    """Of a rank's error the rank's own."""
    monkeypatch.setattr("minidist.cli.train.train", lambda *_: optim.SGD([], lr=np.nan))
    for arguments in (["--tp", "3"], []):
        command = ["train", "--transport", "thread", *arguments]
        assert main(command) == 2
        short = capsys.readouterr().err
        assert main(["--debug", *command]) == 2
        long = capsys.readouterr().err
        assert long.startswith("Traceback") and long.endswith(short.splitlines()[-1] + "\n")
        assert "    raise WrongInput(" in long and "Traceback" not in short


def test_the_help_of_a_command_ends_with_three_examples_which_it_takes():
    for command in cli.COMMANDS:
        parser = cli.parser_of(command)
        lines = parser.format_help().partition("\nexamples:\n")[2].splitlines()
        assert len(lines) == 3
        for words in map(shlex.split, lines):
            words = words[words.index("minidist") :]
            assert words[:2] == ["minidist", command]
            given = parser.parse_args(words[2:])
            assert given.command_type.made_of(given).run


def test_every_command_has_a_line_in_the_help(capsys):
    assert main([]) == 2
    printed = capsys.readouterr().out
    for command, words in cli.COMMANDS.items():
        assert re.search(rf"^  {command} +{re.escape(words)}$", printed, re.M)


def test_the_help_and_a_simulated_timeline_load_no_numpy():
    code = "import sys; from minidist.cli import main; main([]); main(['timeline']);"
    code += "sys.exit('numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "commands:" in done.stdout and "makespan" in done.stdout


def test_the_defaults_of_train_are_those_of_its_settings():
    parser, settings = argparse.ArgumentParser(), Settings()
    TrainCommand.add_to(parser)

    def settings_of(*options):
        command = TrainCommand.made_of(parser.parse_args(["--ranks", "1", *options]))
        return command.settings(4)

    assert settings_of() == settings
    changed = replace(settings, **NUMBERS.defaults | {"batch": 7})
    assert settings_of("--data", "numbers", "--batch", "7") == changed
    helps = {action.dest: action.help for action in parser._actions}
    for name in set(vars(settings)) - {"dp", "tied", "shuffle", *OF_SERVERS}:
        own = f"; numbers: {NUMBERS.defaults[name]}" if name in NUMBERS.defaults else ""
        assert helps[name].endswith(f" (default: {getattr(settings, name)}{own})"), name


@pytest.mark.skipif(why_no_gpu() is None, reason="there is a GPU")
def test_without_a_gpu_there_is_one_clear_error(capsys):
    for command in (["train", *TINY], ["verify"], ["timeline", "--measured"]):
        assert main([*command, "--device", "gpu"]) == 2
        printed = capsys.readouterr()
        assert re.fullmatch("minidist: device 'gpu' is not available here. .*\n", printed.err)
        assert printed.out == ""


@pytest.mark.gpu
def test_train_certifies_on_the_device_it_trained_on_and_says_which(capsys, monkeypatch):
    where = []

    def noted(*args, device, **options):
        where.append(device)
        return run(*args, device=device, **options)

    monkeypatch.setattr(certificate, "run", noted)
    arguments = ["--device", "gpu", "--transport", "thread", "--ranks", "2", *TINY]
    assert main(["train", *arguments]) == 0
    assert "certificate: ok. 2 ranks on gpu against the host, in float64" in capsys.readouterr().out
    assert where == ["gpu"]


@pytest.mark.gpu
def test_nccl_takes_no_more_ranks_than_the_device_has_gpus(capsys):
    pytest.importorskip("cupy.cuda.nccl")
    nccl = ["--transport", "nccl", "--device", "gpu:0"]
    assert main(["train", *nccl, "--ranks", "2", *TINY]) == 2
    err = capsys.readouterr().err
    assert re.fullmatch("minidist: NCCL has one rank per GPU, .* share 1 GPU: .*\n", err)
    assert main(["verify", *nccl, "--strategy", "naive"]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    assert last.endswith("on 2 ranks or more are left out: NCCL has one rank per GPU, here 1")


def test_verify_prints_rows(capsys):
    assert main(["verify", "--transport", "thread", "--strategy", "naive"]) == 0
    *rows, last = capsys.readouterr().out.splitlines()
    assert len(rows) == sum(row.startswith("ok   naive") for row in rows) == 28
    assert re.fullmatch(r"28 rows, all ok; largest error \d.\de-1\d, allowed 1e-09", last)


def test_plan_profiles_runs_and_certifies(capsys):
    sizes = "--layers 1 --width 16 --sequence 4 --vocab 9 --transport thread".split()
    assert main(["plan", "--profile", *sizes, "--bandwidth", "1"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("measuring a Transformer on 2 ranks\n")
    assert "replayed bitwise: largest error 0.0e+00" in printed
    assert main(["plan", "--profile", *sizes, "--ranks", "3", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["certificate"]["ok"] and len(row["profile"]) == 3
    assert sum(replicas for _, _, replicas in row["stages"]) == row["ranks"] == 3


def test_plan_searches_a_published_model(capsys):
    asked = ["plan", "--model", "124m", "--ranks", "2", "--sequence", "128", "--batch", "6"]
    assert main([*asked, "--top", "1", "--others", "2"]) == 0
    head, rate, _, _, best, spent, second, third, *rest = capsys.readouterr().out.splitlines()
    assert "6 examples of 128 tokens, 2 ranks" in head and best.endswith(": the best")
    assert rate == "products at 0.58 of 312 TFLOP/s" and " products " in f" {spent.strip()}"
    assert sum(map(int, re.findall(r"(\d+)%", spent))) in range(97, 104)
    assert "ZeRO 3; see" in second and "slower" in third and "listed plans fit" in " ".join(rest)
    assert rest[-3].startswith("Schedules tried: gpipe, 1f1b,") and "Not tried: " in rest[-2]
    assert main([*asked, "--schedules", "1f1b,zigzag"]) == 2
    assert "unknown schedule 'zigzag'; choose one of" in capsys.readouterr().err
    assert main([*asked, "--json"]) == 0
    first, *others = json.loads(capsys.readouterr().out)
    assert first["fits"] and first["simulated"] and all(one["why"] for one in others)
    assert all(one["simulated"] for one in others if one["fits"])
    assert main([*asked, *"--layers 3 --others 0 --top 1".split()]) == 0
    head, *rest = capsys.readouterr().out.splitlines()
    assert head.startswith("124m with layers 3, sequence 128: 0.1 billion")
    assert "1 listed plans fit, 0" in " ".join(rest) and "does not fit:" not in rest
    assert main([*asked, "--memory", "1MB"]) == 2
    assert "nothing fits; the leanest plan" in capsys.readouterr().err


def test_plan_compares_published_runs(capsys):
    assert main(["plan", "--published"]) == 0
    runs, experts = capsys.readouterr().out.split("\n\n")
    head, *rows, last = runs.splitlines()
    assert head.split()[:2] == ["run", "seconds"] and len(rows) == 21
    assert last.startswith("21 runs: predicted / measured 0.")
    assert experts.startswith("DeepSeek-V3 on 2,048") and "36.63" in experts


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_bench_measures_every_workload_or_says_what_is_missing(capsys):
    assert main(["bench", "--rounds", "1", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    wanted = ["machine", *(n for n, (f, _) in steps.STEPS.items() for _ in steps.AIMS[f])]
    assert [row["name"] for row in rows] == wanted
    assert all(row["ratio"] or row["note"] for row in rows)
    assert all(" ms" in row_as_text(row) for row in rows[1:])


def test_timeline_draws_every_schedule_and_says_its_numbers(capsys):
    for schedule in SCHEDULES:
        assert main(["timeline", schedule, "--pp", "2", "--micro-batches", "4"]) == 0
        printed = capsys.readouterr().out
        assert printed.startswith(f"{schedule}: 2 ranks, 4 micro-batches\n\nunits  |0")
        simulation = simulate(programs(schedule, 2, 4), update=1)
        assert timeline.text(simulation.timeline) in printed
        for line in (
            rf"makespan     {float(simulation.makespan):g} units$",
            r"bubble       \d+\.\d% of ranks x makespan is idle$",
            r"span bubble  \d+\.\d%, counted from each rank's own",
            r"peak stash   \d\S* \d\S*: per rank, the most forward passes",
        ):
            assert re.search(f"^{line}", printed, re.M), (schedule, line)


def test_timeline_searches_an_order_for_the_times_it_is_given(capsys):
    small = ["timeline", "--schedule", "zb_auto", "--pp", "3", "--micro-batches", "4"]
    for more, makespan, peak in (
        (["--latency", "1"], "17", "4 4 4"),
        (["--latency", "1", "--memory", "1"], "44", "1 1 1"),
        (["--backward-input", "2,1,1", "--memory", "3"], "18", "3 2 1"),
    ):
        assert main([*small, *more]) == 0
        printed = capsys.readouterr().out
        assert f"makespan     {makespan} units" in printed and f"stash   {peak}:" in printed


@pytest.mark.parametrize("ending", ["txt", "json", "svg"])
def test_timeline_writes_a_file_as_its_ending_says(capsys, tmp_path, ending):
    if ending == "svg":
        pytest.importorskip("matplotlib")
    path = tmp_path / f"picture.{ending}"
    arguments = ["--schedule", "interleaved", "--chunks", "2", "--out", str(path)]
    assert main(["timeline", *arguments]) == 0
    printed = capsys.readouterr().out
    assert printed.endswith(f"written: {path}\n") and path.stat().st_size > 500
    if ending == "txt":
        assert path.read_text(encoding="utf-8") in printed
    if ending == "json":
        check_chrome_trace(json.loads(path.read_text(encoding="utf-8")))


def test_timeline_measured_prints_the_real_picture_beside_the_simulated_one(capsys, tmp_path):
    path = tmp_path / "run.json"
    small = ["--pp", "2", "--micro-batches", "4", "--schedule", "zb_h1"]
    assert main(["timeline", "--measured", *small, "--out", str(path)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("\nrank 1 ") == 2 and printed.count("scaled: 1 column is") == 2
    assert re.search(r"^  W \d+\.\d\d \d+\.\d\d ms$", printed, re.M)
    assert re.search(
        r"^measured     \d+\.\d ms: \d\.\d\d times the simulated makespan$", printed, re.M
    )
    trace = json.loads(path.read_text(encoding="utf-8"))
    check_chrome_trace(trace)
    assert {"F0", "send", "recv"} <= {e["name"] for e in trace["traceEvents"]}


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs process groups")
@pytest.mark.parametrize(
    "command, after",
    [
        ("train --steps 100000 --dp 2 --pp 2", 0.3),
        pytest.param("timeline --measured --pp 2 --micro-batches 200", 0.3, marks=slow),
        pytest.param("train --steps 100000", 0.0, marks=slow),
    ],
)
def test_ctrl_c_ends_everything_at_once_and_leaves_nothing(command, after):
    process = subprocess.Popen(
        [sys.executable, "-m", "minidist", *command.split()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        process.stdout.readline()  # it has begun
        time.sleep(after)
        begin = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=10)
        assert time.monotonic() - begin < 3
    finally:
        process.kill()
    assert process.returncode == 130
    assert errors.strip().splitlines()[-1] == "minidist: interrupted; all that it began has stopped"
    assert "Traceback" not in errors and "resource_tracker" not in errors
    assert group_gone(process.pid)


CTRL_C = "signal.raise_signal(signal.SIGINT)"


@pytest.mark.parametrize(
    "run",
    [
        f"exec('{CTRL_C}')",  # as an import runs the text of a dataclass
        f"try: {CTRL_C}\n    except KeyboardInterrupt: raise ImportError('of C code')",
        f"atexit.register(signal.raise_signal, signal.SIGINT); {CTRL_C}",
    ],
    ids=["in a text", "in an import", "twice"],
)
def test_ctrl_c_is_exit_status_130_wherever_it_comes(tmp_path, run):
    (tmp_path / "program.py").write_text(
        "import atexit, signal, sys\n"
        "from minidist.cli import main, timeline\n"
        f"def run(self):\n    {run}\n"
        "timeline.TimelineCommand.run = run\n"
        "sys.exit(main(['timeline']))\n"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[2])}
    command = [sys.executable, "-m", "program"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env)
    message = "\nminidist: interrupted; all that it began has stopped\n"
    assert (done.returncode, done.stderr) == (130, message)


@pytest.mark.skipif(os.name != "posix", reason="needs a POSIX shell")
@pytest.mark.parametrize(
    "command, closed, words",
    [
        ("timeline --pp 2 --micro-batches 2", ">&-", "makespan"),
        ("timeline --pp 2 --micro-batches 2", "2>&-", "makespan"),
        (f"train --ranks 2 {' '.join(TINY)}", "<&- >&- 2>&-", "certificate: ok"),
        pytest.param(f"train --ranks 2 {' '.join(TINY)}", "<&-", "certificate: ok", marks=slow),
    ],
)
def test_closed_streams_are_no_error_and_the_others_are_as_ever(command, closed, words):
    started = [sys.executable, "-W", "error", "-m", "minidist", *command.split()]
    done = subprocess.run(
        ["sh", "-c", f'"$@" {closed}', "sh", *started], capture_output=True, text=True, timeout=100
    )
    shown = [line for line in done.stderr.splitlines() if not line.startswith("step ")]
    assert (done.returncode, shown) == (0, [])
    assert (words in done.stdout) == (">&-" not in closed.split())


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_one_line_and_exit_status_1():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-W", "error", "-m", "minidist", "timeline"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert done.returncode == 1
    assert done.stderr == "minidist: cannot write the output: No space left on device\n"


V = """\
# a V on two ranks
placement  0 3 | 1 2
rank 0     F0 F0.1 (F1 B0.1) F1.1 B1.1 B0 B1
rank 1     F0 F0.1 F1 F1.1 B0.1 B1.1 B0 I1 W1
"""


@pytest.fixture
def own(tmp_path):
    """The file of a program."""
    (tmp_path / "own.txt").write_text(V)
    return str(tmp_path / "own.txt")


def test_a_program_in_a_file_is_certified(capsys, own, tmp_path):
    assert main(["verify", "--program", own, "--transport", "thread"]) == 0
    *rows, last = capsys.readouterr().out.splitlines()
    assert len(rows) == 5 and all(row.startswith("ok   pipeline         2 ranks") for row in rows)
    assert last.startswith("5 rows, all ok")
    write(read(V), tmp_path / "own.csv", "torch")
    same = ["verify", "--program", str(tmp_path / "own.csv"), "--transport", "thread", "--json"]
    assert main(same) == 0
    fields = {"strategy", "ranks", "error", "bytes", "bytes_formula", "ok", "promise"}
    for row in json.loads(capsys.readouterr().out):
        assert row["ok"] and row["ranks"] == 2 and fields <= set(row)


def test_what_goes_without_a_program_is_refused_beside_one(capsys, own):
    for arguments, message in [
        ("timeline --pp 3", "the file of --program says all of its order; leave --pp out"),
        ("timeline --schedule gpipe", "the file of --program .* leave --schedule out"),
        ("timeline --memory 2", ".*leave --memory out"),
        ("verify --strategy naive", "--program certifies .* alone; leave --strategy out"),
    ]:
        assert main([*arguments.split(), "--program", own]) == 2
        assert re.match(f"minidist: {message}", capsys.readouterr().err)


@pytest.mark.parametrize("command", ["verify", "timeline"])
def test_a_program_that_cannot_be_run_is_refused_before_a_rank_starts(
    capsys, own, command, monkeypatch
):
    monkeypatch.setattr(equivalence, "Cluster", lambda *arguments: pytest.fail("a rank started"))
    Path(own).write_text(V.replace("W1", ""))
    assert main([command, "--program", own]) == 2
    fault, *lines = capsys.readouterr().err.splitlines()
    assert fault == "minidist: rank 1, action 7: I1 is the last of its micro-batch; missing: W"
    assert lines[-1].strip("^") == " " * lines[-2].index("I1")
    Path(own).write_text(V.replace("W1", "X1"))
    assert main([command, "--program", own]) == 2
    assert "own.txt, line 4, column 44: 'X1' is no action" in capsys.readouterr().err
    assert main([command, "--program", own + "x"]) == 2
    assert re.match("minidist: cannot read '.*own.txtx': No such file", capsys.readouterr().err)


def test_a_preset_is_named_like_a_strategy_uses_all_ranks_and_the_help_says_what_it_splits(capsys):
    assert set(PRESETS) - set(STRATEGIES) == {"tensor"}
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    words = " ".join(capsys.readouterr().out.split())
    for name, preset in PRESETS.items():
        assert f"{name}: {preset.splits}" in words
        for ranks in (1, 2, 3, 4, 6, 8, 12):
            mesh = chosen(name, ranks, {})
            assert mesh["dp"] * mesh["pp"] * mesh["tp"] == ranks and mesh["cp"] == 1
    dealt = {1: (1, 1, 1), 4: (2, 2, 1), 6: (3, 2, 1), 12: (3, 2, 2), 30: (5, 3, 2)}
    assert {ranks: tuple(mesh_of(ranks).values()) for ranks in dealt} == dealt
    asked = {"pp": 4, "schedule": "gpipe", "zero": 0, "width": 8}  # agrees with the preset
    assert chosen("gpipe", 4, asked) == ALONE | {"pp": 4, "schedule": "gpipe"}


@pytest.mark.parametrize(
    "more, lines",
    [
        (
            "--data numbers --strategy hybrid --batch 8 --sample 1",
            ["4 ranks, 2 x 2 x 1 (data, pipeline, tensor), for batches of 8 pairs"],
        ),
        (
            "--strategy downpour --replay --sparse --push-every 2 --context 8 --sample 0",
            [
                "\n4 ranks, 1 of them a server, the others each with a part",
                "\nreplay of the servers' logs: the same bits in all ",
            ],
        ),
    ],
)
def test_the_command_trains_with_a_preset_and_shows_its_mesh(capsys, more, lines):
    small = "--steps 2 --width 8 --transport thread"
    assert main(["train", *more.split(), *small.split()]) == 0
    out = capsys.readouterr().out
    for line in [*lines, "\ncertificate: ok. 4 ranks against one device"]:
        assert line in out
