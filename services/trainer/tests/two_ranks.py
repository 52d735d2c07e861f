"""One trainer process of a trainer group, for the tests of two ranks: `python two_ranks.py PORT_FILE SHM_DIR`.

SIGUSR1 lets its lease lapse, SIGUSR2 renews it.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

from headrace_servicekit.instance import Instance, InstanceConfig
from headrace_trainer.__main__ import mount


async def main() -> None:
    """Serves until the process is killed."""
    port_file = Path(sys.argv[1])
    instance = Instance(InstanceConfig(kind="trainer", shm_dir=Path(sys.argv[2])))
    await mount(instance)
    address = await instance.start()
    instance.fence.grant(11)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, instance.fence.grant, 11, 0.0)
    loop.add_signal_handler(signal.SIGUSR2, instance.fence.grant, 11)
    part = port_file.with_suffix(".part")
    part.write_text(address)
    part.rename(port_file)
    await asyncio.Event().wait()


asyncio.run(main())
