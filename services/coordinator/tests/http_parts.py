"""Answers of the HTTP API, as its tests read them."""


def problems(response) -> dict[str, str]:
    """Problems by key, after checking that the answer is an ErrorView."""
    body = response.json()
    assert set(body) == {"reason", "message", "problems"}
    return {item["key"]: f"{item['problem']}; {item['fix']}" for item in body["problems"]}


async def walk(api, path: str, key: str, size: int) -> list[dict]:
    """All entries of a list, page by page."""
    found, token = [], ""
    while True:
        body = (await api.get(path, params={"page_size": size, "page_token": token})).json()
        found += body[key]
        assert len(body[key]) <= size
        token = body["next_page_token"]
        if not token:
            return found
