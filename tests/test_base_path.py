"""The app and the server below a path of a proxy, at its host if the user told it."""

import urllib.request
from urllib.error import HTTPError

import pytest
from serving import CHROMIUM, browser, open_view, settled, started
from starlette.testclient import TestClient
from test_serve import PROMPT, letters  # noqa: F401 - a fixture

from icebear.app.api import server as api
from icebear.app.base_path import BasePath
from icebear.app.session import Session
from icebear.errors import InputError

HUB = "hub.example.org"


@pytest.mark.parametrize(
    ("text", "path", "host"),
    [
        ("/", "", ""),
        ("/user/me@x/proxy/absolute/8501/", "/user/me@x/proxy/absolute/8501", ""),
        (f"https://{HUB}/user/me", "/user/me", HUB),
        (f"https://{HUB}/user/me%40x.org/%C3%A9", "/user/me@x.org/\u00e9", HUB),
        (f"http://{HUB}:8000", "", HUB),
    ],
)
def test_a_path_or_an_address_is_a_base(text, path, host):
    assert BasePath.parse(text) == BasePath(path, host)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "user",
        "//evil",
        "/a?b",
        "/a#b",
        "/a b",
        "/a/../b",
        "/a/%2e%2E/b",
        "/%2Fevil",
        "/a%3Fb",
        "/a%25b",
        "/%FF",
        "/<x>",
        "ftp://hub/x",
        "http://[",
        "https:///x",
        "https://a_b/x",
    ],
)
def test_another_text_is_no_base(text):
    with pytest.raises(InputError):
        BasePath.parse(text)


@pytest.mark.parametrize("host", ["", HUB])
def test_the_server_answers_below_its_path_and_to_its_host(host, letters):  # noqa: F811
    session = Session("letters")
    session.model = letters
    application = api.server(session, BasePath("/user/me", host))
    body = {"model": "letters", "text": PROMPT}
    for name, is_known in (("localhost", True), (HUB, bool(host)), (f"{HUB}.evil.com", False), (f"x{HUB}", False)):
        client = TestClient(application, base_url=f"http://{name}")
        assert client.post("/user/me/v1/tokenize", json=body).status_code == (200 if is_known else 403)
        assert client.post("/v1/tokenize", json=body).status_code == 404


def test_the_server_answers_below_a_path_with_a_quoted_character(letters):  # noqa: F811
    session = Session("letters")
    session.model = letters
    base = BasePath.parse(f"https://{HUB}/user/me%40x.org/proxy")
    client = TestClient(api.server(session, base), base_url=f"http://{HUB}")
    body = {"model": "letters", "text": PROMPT}
    assert base.quoted == "/user/me%40x.org/proxy"
    for path in (base.path, base.quoted):
        assert client.post(f"{path}/v1/tokenize", json=body).status_code == 200


@pytest.mark.real
@pytest.mark.browser
@pytest.mark.release
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.parametrize("host", [HUB, ""])
def test_the_app_runs_below_its_path(host, tmp_path):
    base = "/user/me/proxy/absolute/8501"
    told = f"https://{host}{base}" if host else base
    with started(tmp_path / "none.db", "--base-path", told, base=base) as (_, address):
        for path in ("/", "/_stcore/health"):
            with pytest.raises(HTTPError):
                urllib.request.urlopen(address.removesuffix(base) + path, timeout=10)
        with browser("--host-resolver-rules=MAP *.example.org 127.0.0.1") as chromium:
            page, sockets = chromium.new_page(), []
            page.on("websocket", lambda socket: sockets.append(socket.url))
            assert page.goto(address.replace("localhost", "other.example.org" if host else HUB)).status == 403
            open_view(page, address.replace("localhost", host or "localhost"))
            page.get_by_label("Prompt", exact=True).wait_for(timeout=60_000)
            page.get_by_role("link", name="Neurons", exact=True).click()
            page.wait_for_url(f"**{base}/neurons*")
            page.goto(page.url.partition("?")[0] + "/x")
            assert settled(page).url.partition("?")[0].endswith(f"{base}/neurons")
            assert sockets
            assert all(f"{host or 'localhost'}:" in url and f"{base}/_stcore/stream" in url for url in sockets)
