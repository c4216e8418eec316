"""The page as people meet it: headless Chromium against real servers, one of which plays four modes at paces of their own."""

import contextlib
import importlib.util
import re
import shutil
import time

import pytest

from server.__main__ import parser, settings
from server.page import TYPES
from tests import checkpoints
from tests.server.conftest import alphabet
from tests.server.processes import SLOW, server_process
from tests.server.serving import DEADLINE, local_server, until
from tests.server.test_runtime import play_every_mode

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
LAST_WORD = "{{ messages[-1]['content'] }}"
MARKUP = "<img src=x onerror=\"document.title='broken'\"><b>bold</b>"
PACE_MS = {("fused", True): 4, ("fused", False): 8, ("unfused", True): 14, ("unfused", False): 24}


def next_token(token):
    """As `alphabet`, but that `0` is answered with markup and a full stop with `A`s."""
    return {ord("0"): 259, ord("."): ord("A")}.get(token) or alphabet(token)


def paced(engine):
    """Four modes, each step as long as PACE_MS says."""
    play_every_mode(engine)
    unhurried(engine)


def unhurried(engine):
    """As long as PACE_MS says: steps of no time reach a busy browser all at once, which has no gap to show then."""
    play = engine.modes.play

    def slowly(batch, kind):
        time.sleep(PACE_MS[engine.modes.mode] / 1e3)
        return play(batch, kind)

    engine.modes.play = slowly


@pytest.fixture(scope="module")
def words(folder):
    """Answers what the last message ends with: `a` with `b` to `z`, `A` without end, `0` with markup."""
    path = checkpoints.chain(folder / "words", next_token, max_position_embeddings=4096)
    return checkpoints.tok_b(path, words=(MARKUP,), chat_template=LAST_WORD)


@pytest.fixture(scope="module")
def four(words):
    with local_server(words, edit=paced) as server:
        yield server


@pytest.fixture(scope="module")
def cpu(words):
    with local_server(words, edit=unhurried) as server:
        yield server


@pytest.fixture(scope="module")
def chromium():
    if importlib.util.find_spec("playwright") is None:
        pytest.skip("playwright is not installed: pip install -e '.[test]'")
    if CHROMIUM is None:
        pytest.skip("no Chromium found: apt-get install chromium")
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=1e3 * DEADLINE)
    with (
        sync_playwright() as playwright,
        contextlib.closing(playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])) as browser,
    ):
        yield browser


@pytest.fixture
def visit(chromium):
    """Open a server's page; what its console says against it fails the test."""
    complaints = []
    with contextlib.ExitStack() as stack:

        def visit(server, wait=True, **options):
            context = stack.enter_context(contextlib.closing(chromium.new_context(**options)))
            page = context.new_page()
            page.set_default_timeout(1e3 * DEADLINE)
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.on(
                "console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None
            )
            page.goto(f"http://127.0.0.1:{server.port}/")
            if wait:
                page.wait_for_selector("#state[data-state=ready]")
            return page

        visit.complaints = complaints
        yield visit
    assert [each for each in complaints if "Failed to load resource" not in each] == []


def expect(locator):
    from playwright.sync_api import expect

    return expect(locator)


def ask(page, text, limit=None):
    if limit is not None:
        page.evaluate("n => (document.getElementById('limit').value = n)", limit)
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def answer(page):
    return page.locator("article.answer").last


def flip(page, ops=None, graph=None):
    for name, value in (("ops", ops), ("graph", graph)):
        if value is not None:
            page.locator(f"input[name={name}][value={value}] + span").click()
            expect(page.locator(f"input[name={name}][value={value}]")).to_be_checked()


def middle_ms(page):
    return float(page.text_content("#p50").replace("–", "nan"))


class TestFiles:
    def test_each_goes_out_with_its_type_and_a_policy_that_lets_nothing_in(self, cpu):
        front = cpu.http.get("/")
        assert front.headers["content-type"] == "text/html; charset=utf-8"
        names = re.findall(r'(?:href|src)="(page/[^"]+)"', front.text)
        assert {"page/app.js", "page/style.css", "page/icon.svg"} <= set(names)
        for name in names:
            response = cpu.http.get(f"/{name}")
            assert response.status_code == 200
            assert response.headers["content-type"] in TYPES.values()
            policy = response.headers["content-security-policy"]
            assert policy.startswith("default-src 'none'; script-src 'self';")
            assert "unsafe" not in policy
        assert not re.search(r"<script(?! type=\"module\" src=)|<style| style=| on[a-z]+=|https?:", front.text)

    def test_they_are_open_where_a_key_is_set_and_what_they_read_is_not(self, words):
        with local_server(words, {"api_key": "k"}) as server:
            assert [server.http.get(path).status_code for path in ("/", "/page/app.js", "/page/none", "/v1/runtime")] == [
                200,
                200,
                401,
                401,
            ]

    def test_no_page_serves_none(self, words):
        assert not settings(parser().parse_args(["--model", "demo", "--no-page"]), "demo").page
        assert settings(parser().parse_args(["--model", "demo"]), "demo").page
        with local_server(words, {"page": False}) as server:
            assert [server.http.get(path).status_code for path in ("/", "/page/app.js")] == [404, 404]


@pytest.mark.browser
class TestChat:
    def test_an_answer_streams_and_what_it_took_is_told(self, visit, cpu):
        page = visit(cpu)
        ask(page, "a")
        expect(answer(page).locator(".text")).to_have_text("bcdefghijklmnopqrstuvwxyz")
        expect(answer(page).locator(".note")).to_contain_text("26 tokens in")
        expect(answer(page).locator(".note")).to_contain_text("unfused, eager")
        for figure in ("p50", "p99", "rate", "bus"):
            expect(page.locator(f"#{figure}")).to_have_text(re.compile(r"^[\d.]+$"))
        expect(page.locator("#strip")).to_have_attribute("aria-label", re.compile("^25 tokens; the middle one took"))

    def test_stop_frees_the_slot_and_keeps_what_arrived(self, visit, four):
        page = visit(four)
        ask(page, "A", limit=3000)
        expect(answer(page)).to_contain_text("AAAA")
        assert four.engine.num_running == 1
        page.press("#prompt", "Escape")
        until(lambda: four.engine.num_running == 0)
        expect(answer(page).locator(".note")).to_contain_text("ended after")
        expect(page.locator("#send")).to_have_text("Send")
        expect(answer(page).locator(".error")).to_have_count(0)

    def test_fields_go_with_the_question_and_a_retry_replaces_the_answer(self, visit, cpu):
        page = visit(cpu)
        asked = []
        page.on("request", lambda request: asked.append(request.post_data_json) if "chat" in request.url else None)
        page.click("summary")
        page.fill("#system", "Be brief.")
        page.fill("#temperature", "0.3")
        page.fill("#seed", "7")
        ask(page, "x")
        expect(answer(page)).to_contain_text("yz")
        page.click(".again")
        expect(page.locator(".again")).to_be_visible()
        expect(page.locator("article.answer")).to_have_count(1)
        first, second = asked
        assert first == second
        assert first["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "x"}]
        assert (first["temperature"], first["seed"]) == (0.3, 7)
        ask(page, "y")
        expect(page.locator("article.answer")).to_have_count(2)
        page.wait_for_selector(".again")
        assert [turn["role"] for turn in asked[2]["messages"]] == ["system", "user", "assistant", "user"]

    @pytest.mark.parametrize("kind", ["text", "ids"])
    def test_models_that_know_no_chats_are_prompted_all_the_same(self, visit, words, kind, monkeypatch):
        monkeypatch.setattr("models.Tokenizer.has_chat_template", property(lambda self: False))
        with local_server(words, text=kind == "text") as server:
            page = visit(server)
            expect(page.locator("#takes")).to_contain_text("This model")
            ask(page, "A")
            expect(answer(page).locator(".note")).to_contain_text("256 tokens in")
            ask(page, "x")
            expect(answer(page).locator(".text")).to_have_text("yz" if kind == "text" else " 121 122")

    def test_markup_stays_text(self, visit, cpu):
        page = visit(cpu)
        ask(page, f"{MARKUP}0")
        expect(answer(page).locator(".text")).to_have_text(MARKUP)
        expect(page.locator("article.user")).to_have_text(f"{MARKUP}0")
        assert page.locator("article img, article b").count() == 0
        assert "broken" not in page.title()

    def test_long_answers_scroll_until_the_reader_scrolls_back(self, visit, four):
        flip(page := visit(four), ops="fused", graph="on")
        page.set_viewport_size({"width": 1000, "height": 330})
        ask(page, "A", limit=3000)
        log = page.locator("#log")
        until(lambda: log.evaluate("e => e.scrollTop") > 40)
        until(lambda: log.evaluate("e => e.scrollHeight - e.scrollTop - e.clientHeight") < 48)
        log.hover()
        page.mouse.wheel(0, -4000)
        expect(page.locator("#latest")).to_be_visible()
        page.wait_for_timeout(200)
        assert log.evaluate("e => e.scrollTop") < 20
        page.click("#latest")
        expect(page.locator("#latest")).to_be_hidden()
        page.click("#send")


@pytest.mark.browser
class TestTheSwitch:
    def test_on_a_cpu_it_tells_why_there_is_one_mode(self, visit, cpu):
        page = visit(cpu)
        expect(page.locator("#why")).to_contain_text("fused kernels and graphs need a CUDA device")
        for name, value in (("ops", "fused"), ("graph", "on")):
            expect(page.locator(f"input[name={name}][value={value}]")).to_be_disabled()
        expect(page.locator("#results tr.absent")).to_have_count(3)

    def test_flipped_in_the_middle_of_a_stream_it_changes_the_pace_and_nothing_else(self, visit, four, monkeypatch):
        monkeypatch.setitem(PACE_MS, ("unfused", False), 250)  # far from the other, whatever a busy machine adds to both
        page = visit(four)
        flip(page, ops="unfused", graph="off")
        table = page.locator("#layer").bounding_box()
        ask(page, "A", limit=200)
        until(lambda: middle_ms(page) > 225)
        flip(page, ops="fused", graph="on")
        until(lambda: four.engine.modes.mode == ("fused", True))
        until(lambda: middle_ms(page) < 175)
        expect(answer(page).locator(".note")).to_contain_text("200 tokens in")
        expect(answer(page).locator(".note")).to_contain_text("unfused, eager, then fused, ")
        expect(answer(page).locator(".text")).to_have_text("A" * 200)
        assert page.locator("#layer").bounding_box() == table
        expect(page.locator("#why")).to_contain_text("Streams stood still for")

    @pytest.mark.parametrize(("ms", "held"), [(3, 1333), (100, 60)])
    def test_a_change_stays_in_sight_for_seconds_however_fast_the_tokens_are(self, visit, four, ms, held):
        """With bars of one width 300 pixels held 60 tokens: a fifth of a second of a model that takes 3 ms a token."""
        page = visit(four)
        page.evaluate(
            """async (ms) => {
                const canvas = document.createElement("canvas"); // 300 pixels of bars, 34 of scale
                document.body.append(Object.assign(canvas, { id: "narrow", style: "width: 334px; height: 90px" }));
                const { Strip } = await import("/page/strip.js");
                new Strip(canvas).add(ms, 2000, { ops: "fused", graph: "on" });
            }""",
            ms,
        )
        expect(page.locator("#narrow")).to_have_attribute("aria-label", re.compile(f"^{held} tokens; "))

    def test_what_others_switch_is_seen(self, visit, four):
        page = visit(four)
        flip(page, ops="unfused")
        four.http.post("/v1/runtime", json={"ops": "fused"})
        expect(page.locator("input[value=fused]")).to_be_checked()
        expect(page.locator("#why")).to_contain_text(re.compile("^fused, .* kernels a token"))

    def test_the_layer_is_drawn_as_its_launches(self, visit, four):
        page = visit(four)
        expect(page.locator("#layer tbody tr")).to_have_count(15)
        expect(page.locator("#layer .block")).to_have_count(5)
        expect(page.locator("#layer thead")).to_have_text("fused: 5 launchesunfused: 15 launches")

    def test_launches_that_make_weights_dense_stand_with_the_product_that_needs_them(self, visit, four):
        """Paired by number alone, every launch behind the first of them stood beside another's fused one, and the last four
        were not drawn."""
        page = visit(four)
        page.evaluate(
            """async () => {
                const runtime = await (await fetch("/v1/runtime")).json();
                const dense = { name: "make dense", fuses: ["make dense"], bytes: 9, us_predicted: null };
                runtime.weights = "int4";
                runtime.launches.unfused = runtime.launches.unfused.flatMap((each) =>
                    ["q", "output", "gate", "down"].includes(each.name) ? [dense, each] : [each]);
                (await import("/page/layer.js")).drawLayer(document.getElementById("layer"), runtime);
            }"""
        )
        expect(page.locator("#layer tbody tr")).to_have_count(19)
        expect(page.locator("#layer .block b")).to_have_text(
            ["norm_qkv_rope", "attention", "proj_residual", "norm_gate_up", "proj_residual"]
        )
        assert page.locator("#layer tbody tr.first th").all_inner_texts() == [
            "norm",
            "rope",
            "make dense",
            "norm",
            "make dense",
        ]
        expect(page.locator("#layer-note")).to_contain_text("weights in int4")


@pytest.mark.browser
def test_the_race_fills_its_table_and_returns_to_the_mode_it_found(visit, four):
    page = visit(four, permissions=["clipboard-read", "clipboard-write"])
    flip(page, ops="fused", graph="off")

    def middles():
        page.reload()
        page.wait_for_selector("#state[data-state=ready]")
        page.click("#race")
        expect(page.locator("#prompt")).to_be_editable()
        expect(page.locator("#verdict")).to_contain_text("Fusing took 10 launches out of each token")
        rows = page.locator("#results tbody tr").all_inner_texts()
        assert [row.split("\t")[0] for row in rows] == ["fused, graph", "fused, eager", "unfused, graph", "unfused, eager"]
        return [float(row.split("\t")[2]) for row in rows]

    def right(p50):
        return p50 == sorted(p50) and all(took >= 0.9 * least for took, least in zip(p50, PACE_MS.values(), strict=True))

    until(lambda: right(middles()))  # again where a browser that stood still has read many tokens at once
    until(lambda: four.engine.modes.mode == ("fused", False))
    page.click("#copy")
    expect(page.locator("#copy")).to_have_text("Copied")
    copied = page.evaluate("navigator.clipboard.readText()").splitlines()
    assert copied[0].startswith("test, float32, CPU")
    assert copied[2] == "| mode | first ms | p50 ms | p99 ms | tok/s | bus |"
    assert len(copied) == 8


@pytest.mark.browser
class TestTroubles:
    def test_a_server_that_is_lost_in_the_middle_of_an_answer_is_told(self, visit, words):
        with server_process(words, prelude=SLOW) as server:
            page = visit(server)
            ask(page, "A")
            expect(answer(page)).to_contain_text("AAAA")
            server.popen.kill()
            expect(answer(page).get_by_role("alert")).to_have_text(re.compile("connection broke.*What arrived is kept"))
            expect(answer(page)).to_contain_text("AAAA")
            expect(page.locator("#state")).to_have_text("The server does not answer. Is it still running?")
            page.click(".again")
            expect(answer(page).get_by_role("alert")).to_contain_text("does not answer")

    def test_a_refusal_is_told_in_the_servers_words_where_it_happened(self, visit, cpu):
        page = visit(cpu)
        ask(page, "a" * 5000)
        expect(answer(page).get_by_role("alert")).to_contain_text("shorten the prompt to at most 4095 tokens")
        asked = []
        page.on("request", lambda request: asked.append(request.post_data_json) if "chat" in request.url else None)
        ask(page, "x")
        expect(answer(page)).to_contain_text("yz")
        assert asked[0]["messages"] == [{"role": "user", "content": "x"}]  # what was refused would be refused again and again

    def test_with_a_key_set_the_page_asks_for_it(self, visit, words):
        with local_server(words, {"api_key": "sesame"}) as server:
            page = visit(server, wait=False)
            expect(page.locator("#lock")).to_be_visible()
            page.fill("#key", "wrong")
            page.click("#unlock button")
            expect(page.locator("#lock-error")).to_have_text("That is not the key.")
            page.fill("#key", "sesame")
            page.click("#unlock button")
            expect(page.locator("#lock")).to_be_hidden()
            ask(page, "x")
            expect(answer(page)).to_contain_text("yz")


@pytest.mark.browser
class TestTheHouse:
    def test_nothing_is_asked_of_anyone_else(self, visit, cpu):
        page = visit(cpu)
        seen = []
        page.on("request", lambda request: seen.append(request.url))
        page.reload()
        ask(page, "a")
        page.wait_for_selector(".again")
        assert len(seen) > 8
        assert all(url.startswith(f"http://127.0.0.1:{cpu.port}/") for url in seen)
        assert page.evaluate("crossOriginIsolated")

    def test_a_script_that_is_not_the_pages_own_does_not_run(self, visit, cpu):
        page = visit(cpu)
        page.evaluate("document.body.append(Object.assign(document.createElement('p'), { id: 'inline' }))")
        with pytest.raises(Exception, match="TrustedHTML"):
            page.evaluate("document.getElementById('inline').innerHTML = '<b>x</b>'")
        visit.complaints.clear()

    @pytest.mark.parametrize("options", [{}, {"color_scheme": "dark"}, {"viewport": {"width": 390, "height": 844}}], ids=str)
    def test_axe_finds_no_serious_fault(self, visit, four, cpu, options):
        axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
        for server, text in ((four, "x"), (cpu, "a" * 5000)):
            page = visit(server, bypass_csp=True, **options)
            page.click("summary")
            ask(page, text)
            page.wait_for_selector(".again")
            found = axe.Axe().run(page).response["violations"]
            serious = [each for each in found if each["impact"] in ("serious", "critical")]
            assert [(each["id"], each["nodes"][0]["html"]) for each in serious] == []

    @pytest.mark.parametrize("width", [1440, 390])
    def test_nothing_jumps_while_an_answer_streams(self, visit, four, width, monkeypatch):
        for mode in PACE_MS:
            monkeypatch.setitem(PACE_MS, mode, 4)
        page = visit(four, viewport={"width": width, "height": 844})
        page.evaluate(
            "window.jumps = []; new PerformanceObserver(list => jumps.push(...list.getEntries().map("
            "e => [e.value, e.sources.map(s => s.node?.id || s.node?.className)]))).observe({ type: 'layout-shift' })"
        )
        for ops in ("unfused", "fused"):
            flip(page, ops=ops)
            ask(page, "x")
            page.wait_for_selector(".again")
        page.click("#race")
        expect(page.locator("#verdict")).to_contain_text("Fusing")
        jumps = page.evaluate("jumps")
        assert sum(value for value, _ in jumps) < 0.01, jumps
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.browser
@pytest.mark.model
def test_the_demo_model_answers_on_the_page(visit):
    with local_server("demo", max_len=512) as server:
        page = visit(server)
        page.click("summary")
        page.fill("#temperature", "0")
        page.get_by_role("button", name="What is the capital of France?").click()
        expect(answer(page).locator(".text")).to_contain_text("Paris")
        page.press("#prompt", "Escape")
        expect(page.locator("#send")).to_have_text("Send")
