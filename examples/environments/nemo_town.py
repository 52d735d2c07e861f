"""The server of nemo_gym.yaml: `python nemo_town.py PORT` in a Python that has NeMo Gym (pip install nemo-gym)."""

import os
import sys

import uvicorn
from fastapi import FastAPI, Request
from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseRunRequest,
    BaseSeedSessionRequest,
    BaseSeedSessionResponse,
    BaseVerifyRequest,
    BaseVerifyResponse,
    SimpleResourcesServer,
)
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import SESSION_ID_KEY, ServerClient
from omegaconf import OmegaConf
from pydantic import BaseModel, PrivateAttr


class SeedRequest(BaseRunRequest, BaseSeedSessionRequest):
    """A row: where the weather is."""

    weather: str


class VerifyRequest(BaseVerifyRequest):
    """The row, and what was said."""

    weather: str


class Asked(BaseModel):
    """Arguments of the tool."""

    town: str


class Town(SimpleResourcesServer):
    """Each session has its own weather, and counts how often it was asked for."""

    config: BaseResourcesServerConfig
    _weather: dict = PrivateAttr(default_factory=dict)

    def setup_webserver(self) -> FastAPI:
        app = super().setup_webserver()
        app.post("/weather")(self.weather)
        return app

    async def seed_session(self, request: Request, body: SeedRequest) -> BaseSeedSessionResponse:
        self._weather[request.session[SESSION_ID_KEY]] = [body.weather, 0]
        return BaseSeedSessionResponse()

    async def weather(self, request: Request, body: Asked) -> str:
        if body.town == "exit":
            os._exit(1)
        own = self._weather[request.session[SESSION_ID_KEY]]
        own[1] += 1
        return f"{own[0]} in {body.town} ({own[1]})"

    async def verify(self, request: Request, body: VerifyRequest) -> BaseVerifyResponse:
        said = body.response.output_text.strip()
        asked = [each for each in body.response.output if each.type == "function_call"]
        told = {
            "mask_sample": said == "mask",
            "failure_reason": "the judge is away" if said == "mask" else None,
        }
        reward = float(said == body.weather) + 0.25 * len(asked)
        return BaseVerifyResponse(**body.model_dump(), reward=reward, **told)


if __name__ == "__main__":
    port = int(sys.argv[-1])
    config = BaseResourcesServerConfig(name="town", host="127.0.0.1", port=port, entrypoint="app.py")
    head = BaseServerConfig(host="127.0.0.1", port=port + 1)
    client = ServerClient(head_server_config=head, global_config_dict=OmegaConf.create({}))
    uvicorn.run(Town(config=config, server_client=client).setup_webserver(), host="127.0.0.1", port=port)
