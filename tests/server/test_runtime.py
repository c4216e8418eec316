"""The live switch and what the server tells of its engine, on the CPU: an engine whose two ops sets are both torch plays four
modes, and writes down which one each step was played in.
"""

import asyncio
import pickle
import threading
import time

import pytest

from models import find_model, load_engine
from runtime.config import EngineConfig
from runtime.decode_step import DecodeStep
from runtime.engine import Prepared
from runtime.errors import ConfigError
from runtime.ops.fused import FusedOps
from runtime.ops.unfused import UnfusedOps
from runtime.request import Request
from server.__main__ import floor, parser, settings
from server.app import facts
from server.worker import Cancel, Shutdown, Switch, Switched, Worker
from tests import checkpoints
from tests.server.serving import DEADLINE, RUNTIME, TEXT, error_of, local_server, texts_of, until
from tests.server.test_gone import ENDLESS


class TorchFused(UnfusedOps):
    """Says of itself what the fused set says, and plays in torch."""

    name = "fused"
    kernels_per_layer = FusedOps.kernels_per_layer
    launches_per_layer = FusedOps.launches_per_layer
    launches_around = FusedOps.launches_around


class Replayed:
    """A step in a graph's place."""

    def __init__(self, step, slot_of_row, played):
        self.step, self.slot_of_row, self.played = step, slot_of_row, played

    def replay(self, batch, kind):
        self.played[-1] = (self.step.ops.name, "on")
        self.tokens, _ = self.step(self.slot_of_row[:batch], kind)
        return self


def play_every_mode(engine):
    """Let a CPU engine play four modes; engine.played is the mode of each decode step, engine.pause its delay."""
    engine.played, engine.pause = [], 0.0
    played = engine.played
    engine.modes.refusal = lambda ops, graph: None
    for ops in (TorchFused(), UnfusedOps()):
        step = DecodeStep(engine.model, ops, engine._sampler, engine.cache, engine.state)
        engine.modes.steps[ops.name], engine.modes.graphs[ops.name] = step, Replayed(step, engine._slot_of_row, played)
    decode = engine._decode

    def write_down(rows):
        time.sleep(engine.pause)
        played.append((engine.modes.ops, "off"))
        decode(rows)

    engine._decode = write_down


@pytest.fixture(scope="module")
def tiny(folder):
    return checkpoints.tok_b(checkpoints.tiny(folder / "switched"))


@pytest.fixture(scope="module")
def four_modes(tiny):
    with local_server(tiny, text=False, edit=play_every_mode) as server:
        yield server


def switch(server, **fields):
    response = server.http.post(RUNTIME, json=fields)
    assert response.status_code == 200, response.text
    return response.json()


class TestTelling:
    def test_the_runtime_is_told(self, letters):
        told = letters.http.get(RUNTIME).json()
        engine = letters.engine
        layers = engine.model.num_layers
        modes = told.pop("modes")
        assert told.pop("memory_used_bytes") > engine.cache.nbytes
        assert told.pop("device_name").startswith("CPU")
        launches = told.pop("launches")
        assert {ops: len(each) for ops, each in launches.items()} == {"fused": 5, "unfused": 15}
        assert all(each["us_predicted"] is None and each["bytes"] > 0 for each in launches["fused"] + launches["unfused"])
        assert told.pop("weight_bytes_per_token") <= told["weight_bytes"]
        assert told == {
            "model": "test",
            "prompts": "chat",
            "ops": "unfused",
            "graph": "off",
            "pdl": "off",
            "dtype": "float32",
            "weights": "bf16",
            "device": "cpu",
            "max_len": 8192,
            "max_slots": 8,
            "layers": layers,
            "kernels_per_layer": None,
            "launches_per_layer": 15,
            "launches_per_step": 15 * layers + 4,
            "host_launches_per_step": 15 * layers + 4,
            "weight_bytes": engine.model.weight_bytes,
            "kv_cache_bytes": engine.cache.nbytes,
            "kv_bytes_per_position": engine.cache.nbytes // (8 * 8192),
            "window": None,
            "launches_context": 512,
            "datasheet_gbps": None,
            "floor_ms": None,
        }
        available = [(mode["ops"], mode["graph"]) for mode in modes if mode["available"]]
        assert available == [("unfused", "off")]
        assert len(modes) == 4
        assert all((mode["reason"] is None) == mode["available"] for mode in modes)
        assert all("CUDA" in mode["reason"] for mode in modes if not mode["available"])

    def test_per_head_norms_are_two_launches_more_in_the_unfused_set_alone(self, letters, monkeypatch):
        monkeypatch.setattr(letters.engine.model, "qk_norm", True)
        assert letters.http.get(RUNTIME).json()["launches_per_layer"] == 17
        step = DecodeStep(letters.engine.model, FusedOps(), letters.engine._sampler, None, None)
        assert step.launches_per_layer == 5

    def test_the_floor_is_the_weights_of_a_token_over_the_datasheets_rate(self, tiny, monkeypatch):
        loaded = load_engine(find_model(str(tiny)), EngineConfig(device="cpu"))
        assert floor(facts(loaded)).startswith("bandwidth floor: not known, no datasheet's read rate for CPU")
        monkeypatch.setattr("server.app.describe", lambda device: "NVIDIA H200")
        monkeypatch.setattr("models.ModelConfig.bytes_per_token", lambda self, dtype, weights: 13_214_154_752)
        assert floor(facts(loaded)) == ("bandwidth floor: 2.75 ms a token, 13.21 GB of weights at the datasheet's 4,800 GB/s")


class TestSwitching:
    def test_four_streams_do_not_notice_it(self, four_modes, monkeypatch):
        asks = [dict(prompt=[i + 1] * (i + 2), max_tokens=300, temperature=float(i % 2), seed=i) for i in range(4)]
        alone = [four_modes.text(**ask) for ask in asks]
        four_modes.engine.played.clear()
        monkeypatch.setattr(four_modes.engine, "pause", 0.05)  # no text ends while modes change
        texts = [""] * 4

        def stream(i):
            texts[i] = "".join(texts_of(four_modes.events(TEXT, **asks[i])))

        threads = [threading.Thread(target=stream, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        until(lambda: four_modes.engine.num_running == 4 and four_modes.engine.played)
        wanted = [("fused", "on"), ("unfused", "on"), ("unfused", "off"), ("fused", "off"), ("unfused", "off")]
        for ops, graph in wanted:
            told = switch(four_modes, ops=ops, graph=graph)
            assert (told["ops"], told["graph"]) == (ops, graph)
            assert four_modes.engine.num_running == 4
            seen = len(four_modes.engine.played)
            until(lambda seen=seen: len(four_modes.engine.played) > seen + 3)
        four_modes.engine.pause = 0
        for thread in threads:
            thread.join()
        assert texts == alone
        played = four_modes.engine.played
        turns = [mode for mode, before in zip(played, [None, *played], strict=False) if mode != before]
        assert turns == [("unfused", "off"), *wanted]

    def test_its_answer_tells_the_new_state(self, four_modes):
        layers = four_modes.engine.model.num_layers
        told = switch(four_modes, ops="fused", graph="on")
        assert 0 <= told.pop("stall_ms") < 1000
        assert (told["kernels_per_layer"], told["launches_per_layer"]) == (4, 5)
        assert (told["launches_per_step"], told["host_launches_per_step"]) == (5 * layers + 3, 1)
        now = four_modes.http.get(RUNTIME).json()
        assert now | {"memory_used_bytes": 0} == told | {"memory_used_bytes": 0}
        assert all(mode["available"] for mode in now["modes"])

    def test_what_is_left_out_stays(self, four_modes):
        for fields, mode in (
            ({"ops": "fused", "graph": "on"}, ("fused", "on")),
            ({"graph": "off"}, ("fused", "off")),
            ({"ops": "unfused", "graph": None}, ("unfused", "off")),
            ({}, ("unfused", "off")),
        ):
            told = switch(four_modes, **fields)
            assert (told["ops"], told["graph"]) == mode

    def test_each_of_many_at_once_is_told_of_its_own(self, four_modes):
        dispatcher = four_modes.service.dispatcher
        wanted = [("fused" if i % 3 else "unfused", bool(i % 2)) for i in range(20)]

        async def all_at_once():
            return await asyncio.gather(*(dispatcher.switch(*mode) for mode in wanted))

        answers = asyncio.run_coroutine_threadsafe(all_at_once(), four_modes.loop).result(DEADLINE)
        assert [(a.playing.ops, a.playing.graph == "on") for a in answers] == wanted
        switch(four_modes, ops="unfused", graph="off")

    def test_an_engine_that_dies_of_it_answers_all_the_same(self, tiny):
        with local_server(tiny, text=False) as server:

            def fail(ops, graph):
                raise RuntimeError("/some/path")

            server.engine.modes.switch = fail
            response = server.http.post(RUNTIME, json={"ops": "fused"})
            assert (response.status_code, error_of(response)["code"]) == (503, "device_error")
            assert "/some/path" not in response.text
            assert server.http.get(RUNTIME).status_code == 503


class Scripted:
    """An engine that writes down what it is told."""

    def __init__(self):
        self.told, self.has_work, self.num_running, self.num_waiting, self.num_positions = [], False, 0, 0, 0
        self.mode, self.modes = ("unfused", False), self

    def prepare(self, every_mode):
        self.told.append(("prepare", every_mode))
        return Prepared(1.0, 2.0)

    def submit(self, request):
        self.told.append(("submit", request.id))

    def cancel(self, request_id):
        self.told.append(("cancel", request_id))

    def switch(self, ops, graph):
        self.told.append(("switch", ops))
        if ops == "fused":
            raise ConfigError("not here")
        return 0.002

    def playing(self):
        return "as it was"


def test_messages_are_taken_in_their_order_and_a_switch_waits_for_no_request():
    engine, reports = Scripted(), []
    worker = Worker(engine, reports.append, every_mode=True)
    first, last = Request("first", (1,)), Request("last", (1,))
    messages = [first, Switch("fused"), last, Cancel("first"), Switch("unfused", True), Shutdown()]
    assert pickle.loads(pickle.dumps(messages)) == messages
    for message in messages:
        worker.put(message)
    worker.start()
    assert worker.stop(DEADLINE)
    assert engine.told == [
        ("prepare", True),
        ("submit", "first"),
        ("switch", "fused"),
        ("submit", "last"),
        ("cancel", "first"),
        ("switch", "unfused"),
    ]
    answers = [report.switched for report in reports if report.switched is not None]
    assert answers == [Switched("as it was", 0.0, "not here"), Switched("as it was", 2.0, None)]
    assert pickle.loads(pickle.dumps(reports)) == reports


@pytest.mark.usefixtures("alive")
class TestRefusals:
    @pytest.mark.parametrize("fields", [{"ops": "fused"}, {"graph": "on"}, {"ops": "fused", "graph": "on"}])
    def test_a_mode_that_the_cpu_cannot_play_is_refused_and_streams_go_on(self, letters, fields):
        """400 and not 409, which OpenAI's clients try again."""
        before = letters.http.get(RUNTIME).json()
        with letters.send(TEXT, stream=True, **ENDLESS):
            until(lambda: letters.engine.num_running == 1)
            status, error = letters.refusal(RUNTIME, **fields)
            assert (status, error["code"]) == (400, "mode_unavailable")
            assert "CUDA" in error["message"]
            assert letters.engine.num_running == 1
        assert letters.http.get(RUNTIME).json()["ops"] == before["ops"]

    @pytest.mark.parametrize(
        "fields", [{"ops": "fast"}, {"ops": "auto"}, {"ops": 1}, {"graph": "auto"}, {"graph": True}, {"mode": "fused"}]
    )
    def test_unknown_values_and_names(self, letters, fields):
        status, error = letters.refusal(RUNTIME, **fields)
        assert (status, error["code"]) == (400, "invalid_value")
        assert next(iter(fields)) in error["message"]

    def test_bodies_that_are_no_object(self, letters):
        for body in (b"", b"[]", b"{", b"null"):
            response = letters.http.post(RUNTIME, content=body, headers={"content-type": "application/json"})
            assert (response.status_code, error_of(response)["code"]) == (400, "invalid_value")

    @pytest.mark.parametrize("kind", [None, "", "text/plain", "application/x-www-form-urlencoded", "application/jsonp"])
    def test_a_content_type_that_browsers_send_unasked_is_415(self, letters, kind):
        response = letters.http.post(RUNTIME, content=b"{}", headers={} if kind is None else {"content-type": kind})
        assert (response.status_code, error_of(response)["code"]) == (415, "unsupported_media_type")

    @pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8"])
    def test_json_is_taken(self, letters, kind):
        assert letters.http.post(RUNTIME, content=b"{}", headers={"content-type": kind}).status_code == 200

    @pytest.mark.parametrize(
        "origin", ["https://evil.example", "null", "", "http://127.0.0.1:1", "http://127.0.0.1", "http://[::1"]
    )
    def test_a_page_of_another_origin_is_403(self, letters, origin):
        response = letters.http.post(RUNTIME, json={}, headers={"origin": origin})
        assert (response.status_code, error_of(response)["code"]) == (403, "foreign_origin")

    def test_a_page_of_our_own_is_taken(self, letters):
        origin = f"http://127.0.0.1:{letters.port}"
        assert letters.http.post(RUNTIME, json={}, headers={"origin": origin}).status_code == 200


def test_the_key_is_asked_for_and_a_page_that_may_read_may_not_switch(tiny):
    page = "https://page.example"
    with local_server(tiny, {"api_key": "k", "cors_origins": (page,)}, text=False) as server:
        assert server.http.get(RUNTIME).status_code == 401
        assert server.http.post(RUNTIME, json={}).status_code == 401
        server.http.headers["authorization"] = "Bearer k"
        assert server.http.get(RUNTIME, headers={"origin": page}).status_code == 200
        assert server.http.post(RUNTIME, json={}).status_code == 200
        assert server.http.post(RUNTIME, json={}, headers={"origin": page}).status_code == 403


def test_until_the_engine_is_prepared_the_port_is_open_and_says_503(tiny):
    asked, release = [], threading.Event()

    def block(engine):
        def prepare(every_mode):
            asked.append(every_mode)
            assert release.wait(DEADLINE)
            return Prepared(1.0, 2.0)

        engine.prepare = prepare

    with local_server(tiny, {"every_mode": True}, text=False, edit=block, state="starting") as server:
        try:
            for method, path in (("GET", "/health"), ("POST", TEXT), ("GET", RUNTIME), ("POST", RUNTIME)):
                response = server.http.request(method, path, json={} if method == "POST" else None)
                assert (response.status_code, error_of(response)["code"]) == (503, "not_serving")
                assert response.headers["retry-after"]
            assert server.http.get("/v1/models").status_code == 200
        finally:
            release.set()
        until(lambda: server.http.get("/health").status_code == 200)
        assert server.http.get(RUNTIME).status_code == 200
        assert asked == [True]


def test_which_modes_are_warmed_is_a_flag():
    flags = ["--model", "demo"]
    assert not settings(parser().parse_args(flags), "demo").every_mode
    assert settings(parser().parse_args([*flags, "--warm", "all"]), "demo").every_mode
