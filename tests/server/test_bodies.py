"""Bodies, routes and keys that are wrong: each is refused in the API's form, small, and nothing else suffers."""

import json
import time

import psutil
import pytest

from tests.server.serving import CHAT, TEXT, error_of, local_server, raw_request, read_until, strict

pytestmark = pytest.mark.usefixtures("alive")
GOOD = b'{"prompt": "a", "max_tokens": 1}'


def raw(server, request):
    """Status, headers and error object of what a raw request gets."""
    with server.connect() as sock:
        sock.sendall(request)
        head, _, body = read_until(sock, lambda data: b"}}" in data).partition(b"\r\n\r\n")
    return int(head.split()[1]), head.lower(), strict(body)["error"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b'{"prompt": "a", "max_to',
        b"[]",
        b'"x"',
        b"null",
        b"5",
        b"[" * 10_000,
        b"[" * 10_000 + b"]" * 10_000,
        b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
        b'{"prompt": "a", "x": ' + b"1" * 5000 + b"}",
        b'{"prompt": "\xff"}',
        b'\xef\xbb\xbf{"prompt": "a"}',
        '{"prompt": "a"}'.encode("utf-16"),
        b"prompt=a",
    ],
)
def test_bodies_that_are_no_json_object_are_400(letters, body):
    for path in (TEXT, CHAT):
        status, error = letters.refusal(path, content=body)
        assert (status, error["type"]) == (400, "invalid_request_error")


def test_a_body_without_content_length_or_chunks_is_none_and_told_so(letters):
    """It was called bad JSON at line 1, column 1. HTTP takes what follows for the next request, which it is not."""
    head = f"POST {TEXT} HTTP/1.1\r\nHost: test\r\n\r\n".encode()
    for sent, words in ((head, "the request has no body; send"), (head + GOOD, "a body needs a Content-Length")):
        status, _, error = raw(letters, sent)
        assert status == 400
        assert words in error["message"]


@pytest.mark.parametrize("length", ["abc", "-1", "1e3", "5, 6"])
def test_a_content_length_that_is_no_count_is_400(letters, length):
    status, head, _ = raw(letters, raw_request(TEXT, GOOD, length))
    assert status == 400
    assert b"application/json" in head


def test_a_body_shorter_than_its_content_length_is_400_when_the_client_stops_sending(letters):
    with letters.connect() as sock:
        sock.sendall(raw_request(TEXT, GOOD, "100"))
        sock.shutdown(1)
        answer = read_until(sock, lambda data: b"}}" in data)
    assert answer.startswith(b"HTTP/1.1 400")


def test_a_body_that_never_comes_is_408(letters, monkeypatch):
    monkeypatch.setattr("server.body.IDLE_SECONDS", 0.2)
    status, head, error = raw(letters, raw_request(TEXT, GOOD, "100"))
    assert (status, error["code"]) == (408, "body_timeout")
    assert b"connection: close" in head


def test_headers_without_end_are_400(letters):
    assert raw(letters, raw_request(TEXT, GOOD, headers="x-a: " + "b" * 70_000 + "\r\n"))[0] == 400
    assert raw(letters, raw_request(TEXT + "?" + "b" * 70_000, GOOD))[0] == 400


def test_a_chunked_body_is_read(letters):
    response = letters.http.post(TEXT, content=iter([GOOD[:5], GOOD[5:]]))
    assert response.json()["choices"][0]["text"] == "b"


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("pause", [0, 0.05])
def test_a_body_behind_an_offer_of_another_protocol_is_read(letters, chunked, pause):
    """Java's client and curl --http2 offer h2c with every first request; they were told that it had no body."""
    offer = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n"
    request = raw_request(TEXT, GOOD, headers=offer)
    if chunked:
        length = f"Content-Length: {len(GOOD)}".encode()
        request = request.replace(length, b"Transfer-Encoding: chunked").replace(
            GOOD, b"%x\r\n%s\r\n0\r\n\r\n" % (len(GOOD), GOOD)
        )
    without = raw_request("/version", b"", method="GET", headers=offer)
    sent = request + without + request + raw_request("/version", b"", method="GET", headers="Connection: close\r\n")
    cut = len(request) - 8
    with letters.connect() as sock:
        for part in (sent[:cut], sent[cut:]) if pause else (sent,):
            sock.sendall(part)
            time.sleep(pause)
        answers = read_until(sock, lambda data: False)
    assert answers.count(b"HTTP/1.1 200") == 4
    assert answers.count(b'"text":"b"') == answers.count(b'"version"') == 2


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_over_the_limit_is_413_and_not_kept(letters, chunked):
    memory = psutil.Process().memory_info().rss
    part = b" " * (1 << 20)
    content = (part for _ in range(60)) if chunked else part * 60
    memory += 0 if chunked else 120 << 20  # the test's own copies
    response = letters.http.post(TEXT, content=content)
    assert response.status_code == 413
    assert error_of(response)["code"] == "body_too_large"
    assert psutil.Process().memory_info().rss - memory < 64 << 20


def test_a_client_that_asks_first_is_told_before_it_sends(letters):
    status, _, _ = raw(letters, raw_request(TEXT, b"", str(60 << 20), headers="Expect: 100-continue\r\n"))
    assert status == 413


def test_the_limit_is_a_setting(alphabet_model):
    with local_server(alphabet_model, {"max_body_bytes": len(GOOD)}, max_len=32) as server:
        assert server.http.post(TEXT, content=GOOD).status_code == 200
        assert server.refusal(TEXT, content=GOOD + b" ")[0] == 413


def test_thousands_of_wrong_messages_make_one_short_complaint(letters):
    start = time.process_time()
    assert letters.refusal(CHAT, messages=[5] * 5000)[0] == 400
    assert letters.refusal(CHAT, messages=[{"role": "user", "content": 5}] * 5000)[0] == 400
    assert letters.refusal(CHAT, messages=[{"role": "x" * 5000, "content": "a"}])[0] == 400
    assert letters.refusal(TEXT, content=json.dumps({"prompt": ["a", 1] * 500_000}).encode())[0] == 400
    assert letters.refusal(TEXT, content=json.dumps({"prompt": ["a"] * 1_000_000}).encode())[0] == 400
    assert letters.refusal(TEXT, content=json.dumps({"prompt": "a", "stop": [1] * 500_000}).encode())[0] == 400
    assert time.process_time() - start < 5


@pytest.mark.parametrize("name", ["nope", "", "TEST"])
def test_a_model_that_is_not_served_is_404(letters, name):
    for path, fields in ((TEXT, {"prompt": "a"}), (CHAT, {"messages": [{"role": "user", "content": "a"}]})):
        status, error = letters.refusal(path, model=name, **fields)
        assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")


def test_an_absent_model_is_the_served_one_and_aliases_are_kept(letters):
    assert letters.complete("a")["model"] == "test"
    assert letters.complete("a", model=None)["model"] == "test"
    assert letters.complete("a", model="alias")["model"] == "alias"


def test_models_are_listed_with_their_context(letters):
    models = letters.http.get("/v1/models").json()
    assert models["object"] == "list"
    assert [(m["id"], m["object"], m["max_model_len"]) for m in models["data"]] == [
        ("test", "model", 8192),
        ("alias", "model", 8192),
    ]
    assert letters.http.get("/v1/models/alias").json() == models["data"][1]
    assert letters.http.get("/v1/models/nope").json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    "path", ["/page/none.js", "/v1", "/v1/embeddings", TEXT + "/", "/v1/../etc/passwd", "/health/x", "/%00"]
)
def test_unknown_routes_are_404_in_the_apis_form(letters, path):
    response = letters.http.get(path)
    assert response.status_code == 404
    assert error_of(response)["code"] == "not_found"


@pytest.mark.parametrize(
    ("method", "path"), [("GET", TEXT), ("GET", CHAT), ("DELETE", TEXT), ("POST", "/health"), ("PUT", "/v1/models")]
)
def test_wrong_methods_are_405_and_say_which_are_right(letters, method, path):
    response = letters.http.request(method, path)
    assert response.status_code == 405
    assert error_of(response)["code"] == "method_not_allowed"
    assert response.headers["allow"]


def test_health_and_version(letters):
    assert letters.http.get("/health").json() == {"status": "ok", "running": 0, "waiting": 0}
    assert letters.http.get("/version").json()["version"]


def test_refusals_hold_no_path_and_no_class_name(letters):
    for body in (b"{", b'{"prompt": {}}', b'{"prompt": "a", "n": []}', b'{"prompt": "a", "stream_options": 5}', b"[]"):
        message = letters.refusal(TEXT, content=body)[1]["message"]
        assert not any(word in message for word in ("/", "Error", "Request", "pydantic", "StreamOptions"))


@pytest.fixture(scope="module")
def locked(alphabet_model):
    settings = {"api_key": "s\u00e9cret", "cors_origins": ("https://page.example",)}
    with local_server(alphabet_model, settings, max_len=32) as server:
        yield server


class TestKey:
    @pytest.mark.parametrize(
        "value", [None, "", "Bearer", "Bearer wrong", "Basic s\u00e9cret", "s\u00e9cret", "Bearer s\u00e9cret2"]
    )
    def test_without_the_key_nothing_opens_but_health(self, locked, value):
        headers = {} if value is None else {"authorization": value.encode()}
        for method, path in (("POST", TEXT), ("POST", CHAT), ("GET", "/v1/models"), ("GET", "/version"), ("GET", "/nope")):
            response = locked.http.request(method, path, headers=headers)
            assert response.status_code == 401
            assert error_of(response)["code"] == "invalid_api_key"
            assert "cret" not in response.text
        assert locked.http.get("/health").status_code == 200

    def test_with_the_key_all_opens(self, locked):
        headers = {"authorization": "bearer s\u00e9cret".encode()}
        assert locked.http.post(TEXT, content=GOOD, headers=headers).json()["choices"][0]["text"] == "b"

    def test_a_page_of_an_allowed_origin_may_ask_without_the_key(self, locked):
        ask = {"origin": "https://page.example", "access-control-request-method": "POST"}
        assert locked.http.options(TEXT, headers=ask).headers["access-control-allow-origin"] == "https://page.example"
        refused = locked.http.post(TEXT, content=GOOD, headers={"origin": "https://page.example"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://page.example"
        ask["origin"] = "https://other.example"
        assert "access-control-allow-origin" not in locked.http.options(TEXT, headers=ask).headers
