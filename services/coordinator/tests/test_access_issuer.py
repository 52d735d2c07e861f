"""Tokens of an OpenID Connect issuer: a real one, with keys of its own, that serves them over HTTP."""

import hmac
import json
import time
from base64 import urlsafe_b64encode

import httpx
import pytest
from headrace_coordinator.access import issuer as module
from headrace_coordinator.access.issuer import BadIssuer, Issuer, IssuerConfig, read_issuer

jwk = pytest.importorskip("joserfc.jwk")
from real_issuer import AUDIENCE, RealIssuer  # noqa: E402


@pytest.fixture
def real(monkeypatch):
    monkeypatch.setattr(module, "AGAIN_S", 0.0)
    made = RealIssuer()
    yield made
    made.server.shutdown()
    made.server.server_close()


def config(real, **more) -> IssuerConfig:
    return IssuerConfig(issuer=real.url, audience=AUDIENCE, **more)


async def test_a_token_is_mapped_to_name_teams_and_scopes(real):
    issuer = Issuer(
        config(
            real,
            name_claim="email",
            teams={"grp-nlp": "nlp"},
            scopes={"read": ["*"], "submit": ["grp-nlp"], "admin": ["grp-platform"]},
        )
    )
    found = await issuer.principal(real.token(email="ann@example.com", groups=["grp-nlp", "grp-other"]))
    assert (found.name, found.teams, found.scopes) == (
        "ann@example.com",
        ("nlp",),
        frozenset({"read", "submit"}),
    )
    admin = await issuer.principal(real.token(email="root@example.com", groups=["grp-platform"]))
    assert admin.may("operate") and admin.teams == ()
    assert real.asked.count("/keys") == 1, "keys are kept"


def forged(real) -> dict[str, str]:
    now, other = int(time.time()), jwk.RSAKey.generate_key(2048, {"kid": "one"})
    whole = real.token()
    head, body, signature = whole.split(".")
    bare, shared = (
        urlsafe_b64encode(json.dumps({"alg": name, "kid": "one"}).encode()).rstrip(b"=").decode()
        for name in ("none", "HS256")
    )
    public = real.keys[0].as_pem(private=False)
    mac = hmac.digest(public, f"{shared}.{body}".encode(), "sha256")
    return {
        "expired": real.token(exp=now - 60),
        "without an end": real.token(exp=None),
        "not yet": real.token(nbf=now + 3600),
        "another audience": real.token(aud="billing"),
        "no audience": real.token(aud=None),
        "another issuer": real.token(iss="https://evil.example"),
        "another's key": real.token(key=other),
        "alg none": f"{bare}.{body}.",
        "alg none, signed": f"{bare}.{body}.{signature}",
        "the public key as a secret": f"{shared}.{body}.{urlsafe_b64encode(mac).rstrip(b'=').decode()}",
        "changed": f"{head}.{body[:-4]}AAAA.{signature}",
        "the admin's name": real.token(sub="admin"),
        "no name": real.token(sub=""),
        "a name that is a path": real.token(sub="../x"),
        "junk": "eyJ.x.y",
    }


async def test_a_token_that_is_not_good_is_refused(real):
    issuer = Issuer(config(real))
    assert (await issuer.principal(real.token())).name == "ann"
    for what, token in forged(real).items():
        assert await issuer.principal(token) is None, what


async def test_keys_rotate(real):
    """A token by a new key is taken at once; one by a key that the issuer has dropped is not, known or new."""
    issuer = Issuer(config(real))
    before = real.token()
    held = await issuer.principal(before)
    assert issuer.holds(held.digest)
    real.keys.insert(0, jwk.ECKey.generate_key("P-256", {"kid": "two"}))
    assert (await issuer.principal(real.token(algorithm="ES256"))).name == "ann"
    assert await issuer.principal(before) is not None, "both keys are there"
    del real.keys[1]
    real.keys.insert(0, jwk.OKPKey.generate_key("Ed25519", {"kid": "three"}))
    assert await issuer.principal(real.token(algorithm="EdDSA")) is not None
    assert await issuer.principal(before) is None
    assert not issuer.holds(held.digest), "what is open under it ends"


async def test_a_known_token_ends_when_it_expires(real):
    clock = [time.time()]
    issuer = Issuer(config(real), lambda: clock[0])
    token = real.token()
    assert await issuer.principal(token) is not None
    clock[0] += 600 + module.LEEWAY_S + 1
    assert await issuer.principal(token) is None


async def test_an_issuer_that_is_away_opens_nothing(real):
    token = real.token()
    real.server.shutdown()
    real.server.server_close()
    assert await Issuer(config(real)).principal(token) is None


async def test_its_tokens_open_the_api(real, served, spec_json):
    from headrace_coordinator.api.http import make_app

    app = make_app(served.coordinator, runs_directory=served.runs, token="own", issuer=Issuer(config(real)))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
        ann, cho = ({"Authorization": f"Bearer {real.token(sub=name, groups=[])}"} for name in ("ann", "cho"))
        run = (await client.post("/v1/runs", json=spec_json, headers=ann)).json()
        assert run["owner"] == "ann"
        assert (await client.get(f"/v1/runs/{run['id']}", headers=cho)).status_code == 404
        bad = {"Authorization": f"Bearer {real.token(aud='billing')}"}
        assert (await client.get("/v1/runs", headers=bad)).status_code == 401


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("issuer: ftp://x\naudience: a\n", "issuer"),
        ("issuer: https://x\n", "audience"),
        ("issuer: https://x\naudience: a\nscopes: {root: [a]}\n", "scopes"),
        ("issuer: https://x\naudience: a\nauduence: b\n", "auduence"),
        ("issuer: [\n", "cannot be read"),
    ],
)
def test_a_bad_file_is_told_by_its_key(tmp_path, text, told):
    path = tmp_path / "oidc.yaml"
    path.write_text(text)
    with pytest.raises(BadIssuer, match=told):
        read_issuer(path)
    with pytest.raises(BadIssuer, match="cannot be read"):
        read_issuer(tmp_path / "none.yaml")
