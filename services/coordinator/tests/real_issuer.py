"""An OpenID Connect issuer on the loopback: a discovery document, keys, tokens by them, and logins with PKCE."""

import base64
import hashlib
import http.server
import json
import secrets
import threading
import time
from urllib.parse import parse_qs, urlencode, urlsplit

from joserfc import jwk, jwt

AUDIENCE = "headrace"


class RealIssuer:
    """Logs `person` in without a question; a code is good once, for the verifier of its challenge."""

    def __init__(self) -> None:
        self.keys = [jwk.RSAKey.generate_key(2048, {"kid": "one"})]
        self.asked: list[str] = []
        self.person = "ann"
        self.opaque = False
        """Whether access tokens are no JWTs, so that the ID token alone says whose they are."""
        self._codes: dict[str, dict[str, str]] = {}
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                path, _, query = self.path.partition("?")
                outer.asked.append(path)
                if path == "/authorize":
                    self.send_response(302)
                    self.send_header("location", outer.authorize(_first(query)))
                    self.end_headers()
                    return
                found = {
                    "/.well-known/openid-configuration": {
                        "issuer": outer.url,
                        "jwks_uri": f"{outer.url}/keys",
                        "authorization_endpoint": f"{outer.url}/authorize",
                        "token_endpoint": f"{outer.url}/token",
                    },
                    "/keys": {"keys": [key.as_dict(private=False) for key in outer.keys]},
                }[path]
                self.say(200, found)

            def do_POST(self):
                form = _first(self.rfile.read(int(self.headers["content-length"])).decode())
                self.say(*outer.exchange(form))

            def say(self, status, found):
                body = json.dumps(found).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def token(self, key=None, algorithm="RS256", **claims) -> str:
        now = int(time.time())
        said = {"iss": self.url, "aud": AUDIENCE, "sub": "ann", "exp": now + 600, "groups": ["grp-nlp"]}
        said = {name: value for name, value in (said | claims).items() if value is not None}
        key = key or self.keys[0]
        return jwt.encode({"alg": algorithm, "kid": key.kid}, said, key, algorithms=[algorithm])

    def authorize(self, asked: dict[str, str]) -> str:
        """Where a browser is led that asked so."""
        assert asked["response_type"] == "code" and asked["code_challenge_method"] == "S256", asked
        assert "openid" in asked["scope"].split()
        code = secrets.token_urlsafe(8)
        self._codes[code] = asked
        return (
            asked["redirect_uri"] + "?" + urlencode({"code": code, "state": asked["state"], "iss": self.url})
        )

    def exchange(self, form: dict[str, str]) -> tuple[int, dict]:
        """Tokens for a code, by the verifier of its challenge alone."""
        asked = self._codes.pop(form.get("code", ""), None)
        digest = hashlib.sha256(form.get("code_verifier", "").encode()).digest()
        challenge = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
        if (
            asked is None
            or challenge != asked["code_challenge"]
            or form["redirect_uri"] != asked["redirect_uri"]
        ):
            return 400, {"error": "invalid_grant"}
        access = "opaque" if self.opaque else self.token(sub=self.person)
        identity = self.token(sub=self.person, nonce=asked["nonce"])
        return 200, {"access_token": access, "token_type": "Bearer", "expires_in": 600, "id_token": identity}

    def end(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def _first(query: str) -> dict[str, str]:
    return {name: values[0] for name, values in parse_qs(query).items()}


def query_of(url: str) -> dict[str, str]:
    return _first(urlsplit(url).query)
