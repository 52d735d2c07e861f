"""A server that speaks the wire of OpenEnv, of which an image is made: `python3 openenv_server.py PORT`."""

import json
import os
import random
import sys

from websockets.sync.server import serve

SCHEMA = {"title": "Guess", "properties": {"said": {"type": "string"}}, "required": ["said"]}


def schema(connection, request):
    if request.path != "/ws":
        return connection.respond(200, json.dumps({"action": SCHEMA}))


def play(connection):
    """The guessing game; `who` tells which process serves, and `exit` ends it."""
    right = ""
    for text in connection:
        asked = json.loads(text)
        kind, data, told = asked["type"], asked.get("data") or {}, {"text": "?"}
        reward, done = None, False
        if kind == "state":
            connection.send(json.dumps({"type": "state", "data": {}}))
            continue
        if kind == "reset":
            right = data.get("right") or random.Random(data["seed"]).choice("123")
        elif kind == "step":
            said = data["said"]
            if said == "exit":
                os._exit(7)
            told = {"text": "no" * (1 + 200_000 * (said == "long"))}
            if said == "who":
                told = {"text": f"{os.getuid()} {os.getcwd()}"}
            done = said == right
            reward = float(done)
        connection.send(
            json.dumps({"type": "observation", "data": {"observation": told, "reward": reward, "done": done}})
        )


print("serving", flush=True)
serve(play, "0.0.0.0", int(sys.argv[1]), process_request=schema).serve_forever()
