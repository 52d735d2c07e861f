"""The page's login: a browser is led to a real issuer, back with a code, and has a token that the API takes."""

import httpx
import pytest
from headrace_coordinator.access.issuer import Issuer, IssuerConfig
from headrace_coordinator.access.login import COOKIE
from headrace_coordinator.api.http import make_app

pytest.importorskip("authlib")
from real_issuer import AUDIENCE, RealIssuer, query_of

PAGE = "http://headrace.example"


@pytest.fixture
def real():
    made = RealIssuer()
    yield made
    made.end()


def browser(served, real, **config) -> httpx.AsyncClient:
    """A browser at the page of a coordinator that takes the issuer's tokens; it follows no redirect by itself."""
    issuer = Issuer(IssuerConfig(issuer=real.url, **{"audience": AUDIENCE, "client_id": "page", **config}))
    app = make_app(served.coordinator, runs_directory=served.runs, token="secret", issuer=issuer)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=PAGE)


async def led_back(page: httpx.AsyncClient) -> str:
    """Where the issuer's redirect leads a browser that begins."""
    begun = await page.get("/login")
    assert begun.status_code == 303 and begun.headers["location"].split("?")[0].endswith("/authorize")
    cookie = begun.headers["set-cookie"].lower()
    assert "httponly" in cookie and "samesite=lax" in cookie
    async with httpx.AsyncClient() as outside:
        return (await outside.get(begun.headers["location"])).headers["location"]


@pytest.mark.parametrize("opaque", [False, True], ids=["access token", "ID token"])
async def test_a_browser_comes_back_with_a_token_that_the_api_takes(served, real, opaque):
    real.opaque, real.person = opaque, "beth"
    async with browser(served, real) as page:
        assert (await page.get("/healthz")).json()["login"]
        back = await led_back(page)
        assert back.startswith(f"{PAGE}/login/done?")
        done = await page.get(back)
        assert done.status_code == 303 and done.headers["location"].startswith("/#token=")
        assert COOKIE not in page.cookies
        token = done.headers["location"].removeprefix("/#token=")
        me = await page.get("/v1/me", headers={"Authorization": f"Bearer {token}"})
        assert (me.json()["name"], sorted(me.json()["scopes"])) == ("beth", ["read", "submit"])
        assert (await page.get(back)).status_code == 401, "an answer of the issuer is good once"


async def test_an_answer_that_is_not_of_this_login_logs_nobody_in(served, real):
    async with browser(served, real) as page, browser(served, real) as other:
        back, foreign = await led_back(page), await led_back(other)
        query = query_of(back)
        for wrong in (
            foreign,  # another browser's, as in a link that somebody sends
            back.replace(query["state"], "x" * 43),
            f"{PAGE}/login/done?code={query['code']}",
            back.replace(query["code"], query_of(foreign)["code"]),  # another verifier's code
            f"{PAGE}/login/done?state={query['state']}&error=access_denied",
            f"{back}&iss=https://evil.example".replace(f"&iss={real.url}", ""),
        ):
            kept = dict(page.cookies)
            refused = await page.get(wrong)
            assert refused.status_code == 401 and "location" not in refused.headers, wrong
            page.cookies.update(kept)


async def test_a_login_whose_token_is_not_for_this_fleet_says_what_to_set(served, real):
    async with browser(served, real, audience="another") as page:
        refused = await page.get(await led_back(page))
    assert refused.status_code == 401 and "audience" in refused.text


async def test_without_a_client_there_is_no_login(served, real, api):
    async with browser(served, real, client_id="") as page:
        answer = await page.get("/login")
        assert answer.status_code == 404 and "client_id" in answer.text
        assert not (await page.get("/healthz")).json()["login"]


async def test_an_issuer_that_is_away_is_named(served, real):
    real.end()
    async with browser(served, real) as page:
        answer = await page.get("/login")
        assert answer.status_code == 503 and real.url in answer.text
