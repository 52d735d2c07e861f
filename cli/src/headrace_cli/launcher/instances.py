"""stub until supervisor"""
from __future__ import annotations
import asyncio, uuid
from headrace_cli.launcher.kept_process import KeptProcess
from headrace_cli.launcher.state import ProcessState
class Instances:
    def __init__(self, wiring, counts, data_dir, environment, on_change):
        self._kept=[(k,KeptProcess(f"{k}-{i}", wiring.instance_command(k,f"{k}-{i}",uuid.uuid4().hex), data_dir.log_file(f"{k}-{i}"), environment, on_change)) for k,n in counts.items() for i in range(n)]
    async def start(self):
        await asyncio.gather(*(p.start() for _,p in self._kept))
    async def stop(self):
        await asyncio.gather(*(p.stop(5) for _,p in self._kept))
    def processes(self):
        return [ProcessState(p.name,k,p.pid,p.restarts) for k,p in self._kept if p.pid]
