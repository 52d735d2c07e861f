"""People with tokens, for the tests of who may do what."""

import contextlib

import httpx

OWN = "s3cret"
"""The API's own token."""
PEOPLE = {
    "ann": ("nlp", ["read", "submit"]),
    "ben": ("nlp", ["read", "submit"]),
    "cho": ("vla", ["read", "submit"]),
    "ops": ("", ["read", "operate"]),
    "eye": ("", ["read"]),
}


@contextlib.asynccontextmanager
async def people_of(served):
    """A client for the admin, each of PEOPLE, and nobody, of an API that asks for tokens."""
    transport = httpx.ASGITransport(served.app_with(OWN))
    async with contextlib.AsyncExitStack() as stack:

        async def client(token: str) -> httpx.AsyncClient:
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            made = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=headers)
            return await stack.enter_async_context(made)

        found = {"admin": await client(OWN), "nobody": await client("")}
        for name, (team, scopes) in PEOPLE.items():
            asked = {"name": name, "team": team, "scopes": scopes}
            made = await found["admin"].post("/v1/tokens", json=asked)
            assert made.status_code == 201, made.text
            found[name] = await client(made.json()["token"])
        yield found


async def submitted(client, spec, **query) -> str:
    """The id of a run that a client has submitted."""
    answer = await client.post("/v1/runs", json=spec, params=query)
    assert answer.status_code == 201, answer.text
    return answer.json()["id"]
