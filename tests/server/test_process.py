"""`python -m server` as its users meet it: a process, real clients, signals, and starts that must fail."""

import re
import signal
import socket
import subprocess
import sys
import time

import openai
import psutil
import pytest

from runtime.__main__ import run_door
from runtime.errors import ConfigError
from server.__main__ import KEY_VARIABLE, parser, run
from tests.checkpoints import write_json
from tests.server.conftest import alphabet, with_tok_b
from tests.server.processes import SLOW, server_process
from tests.server.serving import CHAT, DEADLINE, TEXT, counts, read_until, until
from tests.server.test_gone import ENDLESS

GRACE = 3
"""Seconds: what is to end meanwhile takes a tenth of them, what is not 8 at least."""
EXIT = 8.0
"""Seconds a busy machine may take to end an interpreter that holds torch; what must not be waited for is longer."""
FOR_EVER = "600"
"""Seconds that no test waits for."""


@pytest.fixture(scope="module")
def server(alphabet_model):
    with server_process(
        alphabet_model, "--served-model-name", "letters", "more", "--api-key", "k", "--max-slots", "2"
    ) as process:
        process.http.headers["authorization"] = "Bearer k"
        yield process


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="k", max_retries=0) as client:
        yield client


class TestOpenAI:
    def test_completions(self, client):
        whole = client.completions.create(model="letters", prompt="a", max_tokens=5, temperature=0)
        assert (whole.choices[0].text, whole.choices[0].finish_reason, whole.usage.total_tokens) == ("bcdef", "length", 6)
        chunks = list(client.completions.create(model="letters", prompt="x", max_tokens=5, stream=True))
        assert [chunk.choices[0].text for chunk in chunks] == ["y", "z", ""]
        assert chunks[-1].choices[0].finish_reason == "stop"

    def test_chats(self, client):
        say = dict(model="more", messages=[{"role": "user", "content": "x"}], stop=["q"], n=2, user="me")
        whole = client.chat.completions.create(**say)
        assert [choice.message.role for choice in whole.choices] == ["assistant", "assistant"]
        assert whole.model == "more"
        chunks = list(client.chat.completions.create(**say, stream=True, stream_options={"include_usage": True}))
        assert counts(chunks[-1].usage.model_dump()) == counts(whole.usage.model_dump())
        assert chunks[-1].choices == []
        assert sum(chunk.choices[0].finish_reason is not None for chunk in chunks[:-1]) == 2

    def test_errors(self, client, server):
        with pytest.raises(openai.NotFoundError, match="no model of that name"):
            client.completions.create(model="nope", prompt="a")
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="letters", prompt="a", logit_bias={}, suffix="b")
        assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "suffix")
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="letters", prompt="a" * 9000)
        assert caught.value.code == "context_length_exceeded"
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="x", max_retries=0).models.list()

    def test_models(self, client):
        assert [model.id for model in client.models.list()] == ["letters", "more"]
        assert client.models.retrieve("letters").model_extra["max_model_len"] == 8192


def test_the_start_says_what_is_served_and_how(server):
    output = "".join(server.output)
    for part in (
        "context 8192",
        "KV cache",
        "ops unfused, graph off, pdl off: the CPU has no fused kernels",
        "weights 0.00 GB in",
        "bandwidth floor: not known",
        "temperature 1",
        "top_p 1",
        "Serving letters on http://127.0.0.1:",
        "/v1\n",
    ):
        assert part in output
    until(lambda: any(line.endswith(" INFO ready\n") for line in server.output))


def test_the_log_has_a_line_a_request_and_no_text_of_it(server):
    server.http.post(TEXT, json={"prompt": "abcdefg", "max_tokens": 3}, headers={"x-request-id": "tell-me"})
    until(lambda: any("tell-me" in line for line in server.output))
    (line,) = [line for line in server.output if "tell-me" in line]
    assert "prompt_tokens=7 cached_tokens=0 completion_tokens=3" in line
    assert not any("abcdefg" in line or "Bearer" in line or "POST" in line for line in server.output)


def test_curl_sees_tokens_as_they_come(server):
    request = '{"prompt": "A", "max_tokens": 8000, "stream": true}'
    command = ["curl", "-sN", f"http://127.0.0.1:{server.port}{TEXT}", "-H", "Authorization: Bearer k", "-d", request]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as curl:
        assert curl.stdout.readline().startswith("data: ")
        assert server.http.get("/health").json()["running"] == 1
        curl.kill()


def test_a_killed_client_frees_its_slot(server):
    """Of two slots both are taken by one client; another's request runs as soon as it is gone, and its own ran to no end."""
    logged = len(server.output)
    url, body = f"http://127.0.0.1:{server.port}{TEXT}", dict(prompt="A", n=2, max_tokens=8000, stream=True)
    script = (
        "import httpx\n"
        f"with httpx.stream('POST', {url!r}, json={body}, headers={{'authorization': 'Bearer k'}}) as response:\n"
        "    for line in response.iter_lines():\n"
        "        print(line, flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as victim:
        for _ in range(20):
            victim.stdout.readline()
        victim.kill()
        start = time.monotonic()
        assert server.text("a", max_tokens=3) == "bcd"
        assert time.monotonic() - start < 1
    until(lambda: [line for line in server.output[logged:] if "finish=cancelled" in line])
    assert not [line for line in server.output[logged:] if "completion_tokens=8000" in line]
    assert server.http.get("/health").json()["status"] == "ok"


class TestSignals:
    def test_one_drains_and_ends_with_zero(self, alphabet_model):
        """Streams were cut without an end, or the process waited for all of a long answer."""
        flags = ("--shutdown-timeout", str(GRACE), "--max-slots", "2", "--log-level", "warning")
        with server_process(alphabet_model, *flags, prelude=SLOW) as server:
            children = psutil.Process(server.popen.pid).children(recursive=True)
            short = server.send(TEXT, prompt="A", stream=True, max_tokens=100)
            endless = server.send(TEXT, stream=True, **ENDLESS)
            read_until(endless, lambda data: b'"text"' in data)
            queued = server.send(TEXT, stream=True, **ENDLESS)
            until(lambda: server.http.get("/health").json()["waiting"] == 1)
            server.popen.send_signal(signal.SIGTERM)
            start = time.monotonic()
            until(lambda: server.http.get("/health").status_code == 503)
            assert server.refusal(CHAT, messages=[{"role": "user", "content": "a"}])[1]["code"] == "not_serving"
            ends = [read_until(sock, lambda data: b"[DONE]" in data) for sock in (short, endless, queued)]
            assert b'"finish_reason":"length"' in ends[0]
            for end in ends[1:]:
                assert b'"error":{' in end
                assert end.count(b"[DONE]") == 1
            assert server.popen.wait(DEADLINE) == 0
            assert time.monotonic() - start < GRACE + EXIT
            assert children == []
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", server.port))

    def test_an_idle_server_ends_at_once(self, alphabet_model):
        with server_process(alphabet_model, "--shutdown-timeout", FOR_EVER) as server:
            server.http.get("/health")  # its connection stays open
            start = time.monotonic()
            assert server.stop() == 0
            assert time.monotonic() - start < EXIT
        assert "draining" in server.output[-1]

    def test_a_second_one_does_not_wait(self, alphabet_model):
        flags = ("--shutdown-timeout", FOR_EVER)
        with server_process(alphabet_model, *flags, prelude=SLOW) as server:
            endless = server.send(TEXT, stream=True, **ENDLESS)
            read_until(endless, lambda data: b'"text"' in data)
            server.popen.send_signal(signal.SIGINT)
            until(lambda: server.http.get("/health").status_code == 503)
            server.popen.send_signal(signal.SIGINT)
            start = time.monotonic()
            assert server.popen.wait(DEADLINE) == 128 + signal.SIGINT
            assert time.monotonic() - start < 1

    @pytest.mark.parametrize("call", ["runtime.engine.Engine.step", "models.tokenizer.Tokenizer.encode"])
    def test_a_thread_that_hangs_does_not_keep_the_process(self, alphabet_model, call):
        """The interpreter cannot end around a thread that is inside a call; the event loop waited for texts of megabytes."""
        hang = f"import time, {call.rsplit('.', 2)[0]}; {call} = lambda self, *how: time.sleep(1000); "
        with server_process(alphabet_model, "--shutdown-timeout", "0.2", prelude=hang) as server:
            stuck = server.send(TEXT, prompt="A")
            assert server.http.get("/health").status_code == 200
            start = time.monotonic()
            assert server.stop() == 0
            assert time.monotonic() - start < EXIT
            assert read_until(stuck, lambda data: b"}}" in data).startswith(b"HTTP/1.1 503")


class Served(Exception):
    """The end of a start."""


class TestStart:
    @pytest.fixture
    def start(self, monkeypatch, capsys):
        """Play the door in this process, up to the moment when it would serve: its exit code, stdout and stderr. A process that
        ends needs no signal handlers back, the other tests do."""
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        monkeypatch.setattr("server.__main__.set_up", lambda *how: None)  # pytest's logs stay

        def start(model, *flags):
            args = parser().parse_args(["--model", str(model), "--device", "cpu", "--port", "0", "--max-len", "16", *flags])
            with pytest.raises((SystemExit, Served)) as ended:
                run_door(lambda: run(args))
            return getattr(ended.value, "code", None), *capsys.readouterr()

        yield start
        for number, handler in handlers.items():
            signal.signal(number, handler)

    @pytest.fixture
    def unserved(self, monkeypatch):
        """Nothing is served."""

        async def serve(*how):
            raise Served

        monkeypatch.setattr("server.__main__.serve", serve)

    def test_a_port_that_is_taken_is_told_before_the_weights_are_read(self, server, tmp_path, start):
        code, out, err = start(tmp_path / "nothing here", "--port", str(server.port))
        assert (code, out) == (1, "")
        assert re.fullmatch(r"error: cannot use port \d+ of 127.0.0.1: .*; stop what holds it or choose another --port\n", err)

    def test_a_bad_folder_is_an_exit_code_and_not_a_server(self, tmp_path, start):
        path = with_tok_b(tmp_path / "m", alphabet)
        (path / "model.safetensors").write_bytes(b"")
        code, out, err = start(path)
        assert (code, out) == (1, "")
        assert err.startswith("error: ")

    def test_an_engine_that_cannot_be_prepared_is_one_sentence_and_an_exit_code(
        self, alphabet_model, start, monkeypatch, caplog
    ):
        """The port was open and /health said 503 for ever."""

        def prepare(engine, every_mode):
            raise ConfigError("no graph today; use --graph off")

        monkeypatch.setattr("runtime.engine.Engine.prepare", prepare)
        code, _, err = start(alphabet_model)
        assert (code, err) == (1, "error: no graph today; use --graph off\n")
        assert caplog.text == ""

    @pytest.mark.parametrize(
        "flags",
        [
            ("--max-queue", "-1"),
            ("--port", "70000"),
            ("--shutdown-timeout", "nan"),
            ("--max-body-bytes", "0"),
            ("--max-slots", "17"),
            ("--api-key", ""),
            ("--host", "192.0.2.1"),
            ("--temperature", "-1"),
            ("--top-p", "nan"),
            ("--host", "no such host"),
        ],
    )
    def test_a_wrong_flag_is_told_before_the_weights_are_read(self, tmp_path, flags):
        with pytest.raises(ConfigError):
            run(parser().parse_args(["--model", str(tmp_path / "nothing here"), "--port", "0", *flags]))

    def test_an_empty_key_in_the_environment_is_refused_like_an_empty_flag(self, tmp_path, monkeypatch):
        """As from a variable that was never filled in: the server asked everybody for a key that nobody had."""
        monkeypatch.setenv(KEY_VARIABLE, "")
        with pytest.raises(ConfigError, match=r"\$QUARTET_API_KEY is empty, which would lock nothing"):
            run(parser().parse_args(["--model", str(tmp_path / "nothing here"), "--port", "0"]))

    @pytest.mark.parametrize("key", [" k ", "k\n", "cl\u00e9", "\udcff"])
    def test_a_key_that_no_request_can_carry_is_refused(self, tmp_path, key):
        """A space at its end, as from a file of variables, made a server that nobody could use."""
        with pytest.raises(ConfigError, match="--api-key holds a space or another character that no bearer token can"):
            run(parser().parse_args(["--model", str(tmp_path / "nothing here"), "--port", "0", "--api-key", key]))

    @pytest.mark.parametrize(
        ("flags", "values", "whose"),
        [
            (
                (),
                "temperature 0.7, top_p 1, top_k 7",
                "top_k by flag, temperature by generation_config.json, the rest the API's",
            ),
            (("--generation-config", "none"), "temperature 1, top_p 1, top_k 7", "top_k by flag, the rest the API's"),
        ],
    )
    @pytest.mark.usefixtures("unserved")
    def test_a_flag_wins_over_the_models_file_which_may_be_turned_off(self, tmp_path, start, flags, values, whose):
        path = with_tok_b(tmp_path / "m", alphabet)
        write_json(path / "generation_config.json", {"temperature": 0.7, "top_k": 3})
        _, out, _ = start(path, "--top-k", "7", *flags)
        (line,) = [line for line in out.splitlines() if line.startswith("sampling defaults: ")]
        assert values in line
        assert line.endswith(f"({whose})")

    @pytest.mark.usefixtures("unserved")
    def test_a_server_for_everybody_without_a_key_is_warned_of(self, tmp_path, start, caplog):
        _, out, _ = start(with_tok_b(tmp_path / "m", alphabet), "--host", "0.0.0.0")
        assert "Serving m on http://0.0.0.0:" in out
        assert "anyone" in caplog.text


def test_the_flags_that_scripts_rely_on_are_there():
    known = parser().format_help()
    for flag in (
        "--model",
        "--host",
        "--port",
        "--max-queue",
        "--api-key",
        "--served-model-name",
        "--shutdown-timeout",
        "--revision",
        "--warm",
    ):
        assert flag in known
