"""The agent: asks the model, tells it whether to go up or down, and asks again. It runs in verifiers' own process."""

from __future__ import annotations

import httpx
import verifiers.v1 as vf


class ChatHarnessConfig(vf.HarnessConfig):
    """Options of the harness."""

    guesses: int = 2


class ChatHarness(vf.Harness[ChatHarnessConfig]):
    """Neither a box nor an installation: it only sends requests."""

    NEEDS_CONTAINER = False
    EXECUTES_CODE = False
    APPENDS_SYSTEM_PROMPT = True

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """One game; what `endpoint` hears is what the trace has."""
        messages = [{"role": "user", "content": str(data.prompt)}]
        wanted = trace.task.data.secret
        key = {"Authorization": f"Bearer {secret}"}
        async with httpx.AsyncClient(base_url=endpoint, headers=key, timeout=None) as client:
            for _ in range(self.config.guesses):
                answer = await client.post(
                    "/chat/completions", json={"model": ctx.model, "messages": messages}
                )
                answer.raise_for_status()
                said = answer.json()["choices"][0]["message"]["content"]
                if said not in ("1", "2", "3") or said == str(wanted):
                    break
                hint = "+" if wanted > int(said) else "-"
                messages += [{"role": "assistant", "content": said}, {"role": "user", "content": hint}]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
