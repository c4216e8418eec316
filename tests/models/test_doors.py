"""The doors `python -m models` and `python -m runtime`: what they print, where, and with which exit code."""

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import runtime.__main__ as terminal
from bench.__main__ import run as measure
from models.__main__ import run as look
from runtime.__main__ import run as talk
from runtime.__main__ import run_door
from runtime.errors import CheckpointError, RequestError, UnsupportedModelError
from server.__main__ import main as serve
from tests.checkpoints import chain, edit_json, tiny, tok_b, tok_s

FLAGS = ["--max-len", "128", "--max-slots", "1"]
ALPHABET = {97 + i: 98 + i for i in range(25)} | {122: 256, 10: 97}
"""After the newline that a ChatML prompt ends with: a, b, c, ... z, end."""


@pytest.fixture
def alphabet(tmp_path):
    return str(tok_b(chain(tmp_path / "alphabet", ALPHABET)))


def door(*arguments, stdin=""):
    """Run a door in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", *arguments], input=stdin, capture_output=True, text=True, timeout=280, check=False
    )
    return done.returncode, done.stdout, done.stderr


# python -m models


def test_a_checkpoint_is_described_line_by_line(tmp_path, capsys):
    path = tiny(tmp_path / "small", "qwen3", eos_token_id=[5, 6], tie_word_embeddings=True)
    assert look([str(path)]) == 0
    lines = {line[:16].strip(): line[16:] for line in capsys.readouterr().out.splitlines()}
    assert lines["model"] == "small"
    assert lines["family"] == "qwen3 (Qwen3ForCausalLM)"
    assert lines["shapes"].startswith("L 2 layers, C 256 hidden, H 8 heads, K 2 kv heads, D 32 head dim, F 344 MLP, V 512")
    assert lines["traits"] == "rope default, theta 10000; per-head q and k norm; LM head tied to the embedding"
    assert lines["dtype"] == "bfloat16"
    assert lines["parameters"] == "988,544"
    assert lines["read per token"] == "1,977,088 bytes of weights, and K and V of the context"
    assert lines["KV cache"] == "512 bytes per position"
    assert lines["end ids"] == "5, 6"
    assert lines["supported"] == "yes"


def test_bytes_may_be_counted_in_another_dtype(tmp_path, capsys):
    assert look([str(tiny(tmp_path)), "--dtype", "float32"]) == 0
    assert "dtype           float32; stored as bfloat16" in capsys.readouterr().out


def test_what_is_not_supported_says_why_with_exit_code_1(tmp_path, capsys):
    edit_json(tiny(tmp_path) / "config.json", model_type="mixtral", architectures=["MixtralForCausalLM"])
    assert look([str(tmp_path)]) == 1
    assert capsys.readouterr().out.startswith("supported       no: ")


def test_random_models_say_so(capsys):
    assert look(["random:llama-2-7b"]) == 0
    out = capsys.readouterr().out
    assert "random weights, seed 0" in out
    assert "13,214,687,232 bytes of weights" in out


def test_a_folder_that_is_none_is_one_line_on_stderr():
    code, out, err = door("models", "./nothing")
    assert (code, out) == (1, "")
    forms = "`demo`, a local folder or .gguf file, a hub id or `random:<shape>`"
    assert err == f"error: './nothing' is no folder or file; give {forms}\n"


# python -m runtime


def test_a_prompt_goes_through_the_chat_template_and_streams_to_stdout(alphabet, capsys):
    assert talk([alphabet, "--prompt", "hi", *FLAGS]) == 0
    captured = capsys.readouterr()
    assert captured.out == "abcdefghijklmnopqrstuvwxyz\n"
    assert "[21 prompt tokens, 27 output tokens, first token " in captured.err
    assert "tok/s]" in captured.err
    assert "dtype bfloat16" in captured.err


def test_raw_leaves_the_template_out(alphabet, capsys):
    assert talk([alphabet, "--prompt", "x", "--raw", *FLAGS]) == 0
    captured = capsys.readouterr()
    assert captured.out == "yz\n"
    assert "[1 prompt tokens, 3 output tokens" in captured.err


def test_a_model_without_a_template_continues_the_text(tmp_path, capsys):
    path = tok_s(chain(tmp_path, {263: 264, 264: 265, 265: 2}, eos_token_id=2))
    assert talk([str(path), "--prompt", "a", *FLAGS]) == 0
    assert capsys.readouterr().out == " b c\n"


def test_a_folder_of_an_odd_name_answers_like_a_plain_one(tmp_path, capsys, monkeypatch):
    path = tok_b(chain(tmp_path / "my model #1 (v1.0) é", ALPHABET))
    (path / "old.safetensors").mkdir()
    monkeypatch.chdir(tmp_path)
    for name in (f"{path}/", path.name):
        assert talk([name, "--prompt", "x", "--raw", *FLAGS]) == 0
        assert capsys.readouterr().out == "yz\n"


def test_max_tokens_cuts_and_ignore_eos_runs_on(alphabet, capsys):
    talk([alphabet, "--prompt", "x", "--raw", "--max-tokens", "1", *FLAGS])
    assert capsys.readouterr().out == "y\n"
    talk([alphabet, "--prompt", "x", "--raw", "--max-tokens", "5", "--ignore-eos", *FLAGS])
    captured = capsys.readouterr()
    assert captured.out == "yz\n"
    assert "5 output tokens" in captured.err


def test_ids_take_the_place_of_a_text(alphabet, capsys):
    assert talk([alphabet, "--prompt-ids", "120,121", *FLAGS]) == 0
    assert capsys.readouterr().out == "z\n"


def test_an_answer_to_ids_is_cut_at_the_end_of_the_context(tmp_path, capsys):
    """More tokens than fit were refused, with the advice to lower a --max-len that nobody had given."""
    folder = tok_b(tiny(tmp_path, max_position_embeddings=16))
    for flags, tokens in (([], 14), (["--max-len", "8"], 6)):
        assert talk([str(folder), "--prompt-ids", "65,66", "--max-tokens", "100", "--device", "cpu", *flags]) == 0
        assert f"2 prompt tokens, {tokens} output tokens" in capsys.readouterr().err


def test_a_piped_prompt_is_read_without_its_last_newline(alphabet, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("x\n"))
    assert talk([alphabet, "--raw", *FLAGS]) == 0
    assert capsys.readouterr().out == "yz\n"


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_a_piped_prompt_that_is_not_utf_8_is_one_sentence(alphabet, monkeypatch, errors):
    """It was a traceback, or a word about lone surrogates, by the locale."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), "utf-8", errors))
    with pytest.raises(RequestError, match="the prompt is not UTF-8; convert it"):
        talk([alphabet, *FLAGS])


def test_a_seed_repeats_a_sampled_answer(tmp_path, capsys):
    path = str(tok_b(tiny(tmp_path)))
    answers = []
    for seed in ("1", "1", "2"):
        talk([path, "--prompt-ids", "1,2,3", "--temperature", "1", "--seed", seed, "--max-tokens", "20", *FLAGS])
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1] != answers[2]


def test_random_models_ask_for_ids_before_weights_are_made():
    with pytest.raises(RequestError, match=r"random:llama-2-7b has no tokenizer; give --prompt-ids 1,2,3"):
        talk(["random:llama-2-7b", "--prompt", "hi"])


def test_an_unknown_random_model_is_told_from_one_without_a_tokenizer():
    with pytest.raises(CheckpointError, match="random:gpt-2 is unknown; random models: llama-2-7b"):
        talk(["random:gpt-2", "--prompt", "hi"])


def test_auto_is_the_default_length(alphabet, capsys):
    assert talk([alphabet, "--prompt", "x", "--raw", "--max-len", "auto", "--max-slots", "1"]) == 0
    assert "context 512 positions" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--prompt", "x", "--ops", "fused", "--device", "cpu"], 1, "error: ops fused was asked for"),
        (["--prompt", "x" * 200], 1, "error: the prompt has"),
        (["--prompt", ""], 1, "error: the prompt is empty; give --prompt TEXT, or a text on stdin"),
        (["--raw"], 1, "error: the prompt is empty"),
        (["--prompt", "x", "--prompt-ids", "1"], 2, "--prompt-ids: not allowed with argument --prompt"),
        (["--prompt-ids", "1", "--raw"], 1, "error: --raw and --prompt-ids were given"),
        (["--prompt-ids", "1", "--system", "x"], 1, "error: --system and --prompt-ids were given"),
        (["--prompt", "x", "--raw", "--system", "x"], 1, "error: --system and --raw were given"),
        (["--prompt-ids", "5000"], 1, "error: token id 5000 is outside the vocabulary"),
        (["--prompt-ids=-1,2"], 1, "error: token id -1 is outside the vocabulary of 0 to 319"),
        (["--prompt-ids", "9" * 30], 1, "9 is outside the vocabulary"),
        (["--prompt", "x", "--temperature", "nan"], 1, "error: temperature is nan"),
        (["--prompt", "x", "--max-tokens", "0"], 1, "error: max_tokens is 0"),
        (["--prompt-ids", "1,x"], 2, "no list of token ids"),
        (["--prompt", "x", "--max-len", "some"], 2, "'some' is neither auto nor a whole number"),
        (["--prompt", "x", "--chat-template", "none"], 1, "error: --chat-template 'none' is neither a file"),
        (["--dtype", "int8"], 2, "invalid choice"),
    ],
    ids=str,
)
def test_mistakes_are_one_sentence_and_an_exit_code(alphabet, capsys, monkeypatch, arguments, code, words):
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n"))
    with pytest.raises(SystemExit) as ended:
        run_door(lambda: talk([alphabet, *arguments, *FLAGS]))
    assert ended.value.code == code
    err = capsys.readouterr().err
    assert words in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prompt", "x", "--top-p", "2"], "top_p is 2.0"),
        (["--prompt", "x", "--max-tokens", "0"], "max_tokens is 0"),
        (
            ["--prompt", "hi", "--max-len", "10"],
            "21 tokens and the context holds 10, .* raise --max-len above 21",
        ),
        (["--prompt", "x" * 600], "the context holds 512, the answer included; shorten the prompt"),
    ],
    ids=str,
)
def test_what_cannot_run_is_refused_before_the_weights_are_read(alphabet, monkeypatch, arguments, words):
    """A temperature out of range was told when 13 GB had been loaded."""
    monkeypatch.setattr(terminal, "load_engine", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(RequestError, match=words):
        talk([alphabet, *arguments])


def test_the_terminal_takes_one_slot(alphabet, capsys):
    talk([alphabet, "--prompt", "hi", "--max-len", "64"])
    assert "context 64 positions in each of 1 slot" in capsys.readouterr().err


@pytest.mark.parametrize(("closed", "code", "shown"), [("stdin", 1, ""), ("stdout", 0, ""), ("stderr", 0, "yz\n")])
def test_a_closed_descriptor_is_no_traceback(alphabet, capsys, monkeypatch, closed, code, shown):
    """Python has None in its place then. The notes went to stdout, into the answer; `None.isatty()` was a traceback."""
    monkeypatch.setattr(sys, closed, None)
    prompt = [] if closed == "stdin" else ["--prompt", "x"]
    with pytest.raises(SystemExit) as ended:
        run_door(lambda: talk([alphabet, *prompt, "--raw", *FLAGS]))
    assert (ended.value.code, capsys.readouterr().out) == (code, shown)


@pytest.mark.parametrize(
    "words",
    [("-m", "runtime"), ("-m", "bench"), ("-m", "models", "demo"), ("-m", "server"), ("-c", "import server.__main__")],
    ids=" ".join,
)
def test_ctrl_c_while_torch_is_imported_shows_no_traceback(words):
    """A console script imports its door under another name than `__main__`."""
    command = [sys.executable, "-X", "importtime", *words]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert any("torch." in line for line in process.stderr)  # its first modules are in
        process.send_signal(signal.SIGINT)
        assert "Traceback" not in process.stderr.read()
    assert process.returncode == -signal.SIGINT


@pytest.mark.parametrize("door", ["runtime", "server", "bench", "models"])
def test_a_models_folder_where_the_user_stands_is_not_taken_for_ours(tmp_path, door):
    """A folder of weights called `models`, or a `runtime.py`, is common; `python -m` looks into the current folder first."""
    ours, stands = Path(terminal.__file__).parent.parent, tmp_path / "here"
    stands.mkdir()
    for other in {"models", "runtime"} - {door}:
        (stands / f"{other}.py").write_text("raise SystemExit('not ours')")
    # In torch's place, which takes seconds to import: says which ones the door takes, and ends it.
    say = "print(*(importlib.util.find_spec(name).origin for name in ('models', 'runtime')))"
    (tmp_path / "torch.py").write_text(f"import importlib.util\n{say}\nraise SystemExit(0)")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ours}"}
    command = [sys.executable, "-m", door]
    done = subprocess.run(command, cwd=stands, env=environment, capture_output=True, text=True, check=False, timeout=280)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == [str(ours / name / "__init__.py") for name in ("models", "runtime")]


@pytest.mark.parametrize("door", [talk, look, serve, measure])
@pytest.mark.parametrize(("typed", "called"), [("/opt/bin/quartet-door", "quartet-door"), ("/src/__main__.py", "python -m ")])
def test_the_usage_line_names_what_was_typed(monkeypatch, capsys, door, typed, called):
    monkeypatch.setattr(sys, "argv", [typed, "--help"])
    with pytest.raises(SystemExit):
        door()
    assert capsys.readouterr().out.startswith(f"usage: {called}")


@pytest.mark.parametrize(("door", "words"), [(serve, []), (measure, ["latency"])])
def test_a_model_without_its_flag_is_told_of_it(monkeypatch, capsys, door, words):
    monkeypatch.setattr(sys, "argv", ["quartet-door", *words, "demo"])
    with pytest.raises(SystemExit):
        door()
    assert "unrecognized arguments: demo; a model is given as --model demo\n" in capsys.readouterr().err


def test_a_reader_that_leaves_is_no_error(alphabet):
    command = f"{sys.executable} -m runtime {alphabet} --prompt x --raw --ignore-eos --max-len 100 | head -c 1"
    done = subprocess.run(
        ["bash", "-c", f"{command}; echo code ${{PIPESTATUS[0]}}"], capture_output=True, text=True, check=False
    )
    assert done.stdout == "ycode 141\n"
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr


def test_ctrl_c_ends_a_door_with_130(capsys):
    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as ended:
        run_door(interrupted)
    assert ended.value.code == 130


def test_an_unsupported_model_ends_a_door_with_1(capsys):
    def refuse():
        raise UnsupportedModelError("no such kind")

    with pytest.raises(SystemExit) as ended:
        run_door(refuse)
    assert ended.value.code == 1
    assert capsys.readouterr().err == "error: no such kind\n"


# The chat


@pytest.fixture
def typed(monkeypatch):
    """Makes stdin a terminal on which these lines are typed; an exception stands for its key."""

    def type_lines(*lines):
        waiting = list(lines)

        def read(_prompt):
            line = waiting.pop(0) if waiting else EOFError()
            if isinstance(line, BaseException):
                raise line
            return line

        monkeypatch.setattr("builtins.input", read)
        monkeypatch.setattr(sys, "stdin", type("Terminal", (io.StringIO,), {"isatty": lambda self: True})())

    return type_lines


def prompt_tokens(err):
    return [int(line.split()[0][1:]) for line in err.splitlines() if line.startswith("[")]


def test_a_chat_keeps_its_history_and_ends_at_ctrl_d(alphabet, typed, capsys):
    typed("hi", "", "  ", KeyboardInterrupt(), "ho")
    assert talk([alphabet, "--max-tokens", "3", *FLAGS]) == 0
    captured = capsys.readouterr()
    assert captured.out == "abc\nabc\n"
    first, second = prompt_tokens(captured.err)
    turn = len("<user\nho>\n") + len("<assistant\nabc>\n")
    assert (first, second) == (21, 21 + turn)


def test_a_system_message_stands_in_front(alphabet, typed, capsys):
    typed("hi")
    talk([alphabet, "--system", "be brief", *FLAGS])
    assert prompt_tokens(capsys.readouterr().err) == [21 + len("<system\nbe brief>\n")]


@pytest.fixture
def ctrl_c():
    """Python's own handler, whatever a test before, or who started this process, left there."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_stops_the_answer_and_the_chat_goes_on(alphabet, typed, capsys, monkeypatch):
    shown = []
    original = terminal._show

    def show(text):
        shown.append(text)
        if "".join(shown) == "abc":
            signal.raise_signal(signal.SIGINT)
        return original(text)

    monkeypatch.setattr(terminal, "_show", show)
    typed("hi", "ho")
    assert talk([alphabet, *FLAGS]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("abc")
    assert len(first) < 6
    assert second == "abcdefghijklmnopqrstuvwxyz"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_conversation_that_fills_the_context_begins_anew(alphabet, typed, capsys):
    """The message that did not fit was lost, and had to be typed again."""
    typed("hi", "x" * 90, "y" * 200, "ho")
    assert talk([alphabet, "--max-tokens", "3", *FLAGS]) == 0
    captured = capsys.readouterr()
    assert captured.out == "abc\nabc\nabc\n"
    assert captured.err.count("a new one begins with this message") == 2
    assert "error: this model's maximum context length is " in captured.err  # the one that fits nowhere
    assert prompt_tokens(captured.err) == [21, 19 + 90, 21]
    assert "Ctrl-D ends the chat" in captured.err


def test_a_chat_needs_a_template(tmp_path, typed):
    typed("hi")
    path = str(tok_b(chain(tmp_path, ALPHABET), chat_template=None))
    with pytest.raises(RequestError, match="has no chat template to talk by"):
        talk([path, *FLAGS])
