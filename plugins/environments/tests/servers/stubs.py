"""Servers that speak the wire of OpenEnv, or of NeMo Gym, without their packages: `python stubs.py NAME PORT`.

They play what the real ones beside this file play, whose tests are the same.
"""

import json
import os
import random
import sys
import uuid

import uvicorn
from fastapi import FastAPI, Request, Response, WebSocket, WebSocketDisconnect
from fastapi.responses import HTMLResponse

SESSIONS = 2
TOOL = {"name": "weather", "description": "Tells the weather."}


def openenv(schema, episode):
    """`episode` plays: asked with a message's type and data, it says an observation, a reward, and the end."""
    app, connected = FastAPI(), set()

    @app.get("/schema")
    def schemas():
        return {"action": schema, "observation": {}, "state": {}}

    @app.websocket("/ws")
    async def play(socket: WebSocket):
        await socket.accept()

        async def answer(kind, **data):
            await socket.send_text(json.dumps({"type": kind, "data": data}))

        if len(connected) == SESSIONS:
            await answer("error", code="CAPACITY_REACHED", message="Server at capacity")
            return await socket.close()
        connected.add(socket)
        plays = episode()
        try:
            while True:
                asked = json.loads(await socket.receive_text())
                try:
                    if asked["type"] == "state":
                        await answer("state", step_count=0)
                        continue
                    observation, reward, done = plays(asked["type"], asked["data"])
                    told = {"metadata": {}, **observation}
                    await answer("observation", observation=told, reward=reward, done=done)
                except KeyError as error:
                    errors = [{"loc": [error.args[0]], "msg": "Field required"}]
                    await answer("error", code="VALIDATION_ERROR", message="Invalid message", errors=errors)
                except RuntimeError as error:
                    await answer("error", code="EXECUTION_ERROR", message=str(error))
        except WebSocketDisconnect:
            connected.discard(socket)

    return app


def game():
    """The guessing game."""
    turn, secret = 0, ""

    def play(kind, data):
        nonlocal turn, secret
        if kind == "reset":
            turn, secret = 0, data.get("secret") or random.Random(data.get("seed")).choice("123")
            return {"text": "?"}, None, False
        said, turn = data["said"], turn + 1
        if said == "raise":
            raise RuntimeError("the game fell over")
        if said == "exit":
            os._exit(1)
        right = said == secret
        return {"text": "+" if secret > said else "-"}, float(right), right or turn == 2

    return play


def town():
    """An environment of tools."""

    def play(kind, data):
        if kind == "reset":
            return {}, None, False
        if data["type"] == "list_tools":
            properties = {"town": {"type": "string"}}
            return (
                {"tools": [{**TOOL, "input_schema": {"type": "object", "properties": properties}}]},
                None,
                False,
            )
        if "town" not in data["arguments"]:
            return {"result": None, "error": {"message": "Missing required argument"}}, None, False
        return {"result": {"data": f"rain in {data['arguments']['town']}"}, "error": None}, None, False

    return play


def nemo():
    """A resources server whose sessions have a weather each."""
    app, sessions = FastAPI(), {}

    @app.post("/seed_session")
    async def seed_session(request: Request, response: Response):
        key = uuid.uuid4().hex
        sessions[key] = [(await request.json())["weather"], 0]
        response.set_cookie("session", key)
        return {}

    @app.post("/weather")
    async def weather(request: Request, response: Response):
        body = await request.json()
        if body.get("town") == "exit":
            os._exit(1)
        if "town" not in body:
            response.status_code = 422
            return {"detail": "Field required"}
        own = sessions[request.cookies["session"]]
        own[1] += 1
        return f"{own[0]} in {body['town']} ({own[1]})"

    @app.post("/verify")
    async def verify(request: Request):
        body = await request.json()
        output = body["response"]["output"]
        said = "".join(part["text"] for each in output for part in each.get("content", ())).strip()
        asked = [each for each in output if each["type"] == "function_call"]
        told = {"mask_sample": said == "mask", "failure_reason": "the judge is away"}
        return {**body, "reward": float(said == body["weather"]) + 0.25 * len(asked), **told}

    return app


def pages():
    """A web site, as a wrong address has."""
    app = FastAPI(openapi_url=None)
    app.get("/{path:path}", response_class=HTMLResponse)(lambda path: "<html><body>Welcome</body></html>")
    return app


ACTION = {"properties": {"said": {"type": "string"}, "metadata": {}}, "required": ["said"], "title": "Guess"}
APPS = {
    "openenv": lambda: openenv(ACTION, game),
    "openenv-tools": lambda: openenv({"properties": {}, "title": "Action"}, town),
    "nemo": nemo,
    "pages": pages,
}

if __name__ == "__main__":
    uvicorn.run(APPS[sys.argv[1]](), host="127.0.0.1", port=int(sys.argv[2]), log_level="warning")
