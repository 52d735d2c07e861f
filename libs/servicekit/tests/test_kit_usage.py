"""What heartbeats say of cores and GPUs."""

import subprocess
import sys
import time

from headrace_servicekit.lease.gpus import Amd, GpuUse, Nvidia
from headrace_servicekit.lease.usage import Usage

SPIN = """
import time
while time.process_time() < 0.3:
    pass
print(flush=True)
time.sleep(60)
"""


def test_a_childs_work_is_counted_once_and_only_while_it_is_done():
    usage = Usage(list, dict)
    began = time.monotonic()
    assert usage.cores() == 0.0, "nothing is known of the time before the first look"
    with subprocess.Popen([sys.executable, "-c", SPIN], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        busy_s = usage.cores() * (time.monotonic() - began)
        assert busy_s > 0.25, "0.3 s, told in ticks of 10 ms"
        time.sleep(0.2)
        assert usage.cores() * 0.2 < 0.15, "it sleeps"
        child.kill()


def test_gpus_are_those_that_it_holds_and_nobody_waits_for_their_tool():
    held = ["boot/cpu:0"]
    asked = []

    def ask():
        asked.append(1)
        return {"GPU-aa": GpuUse(0.5, 7), "GPU-bb": GpuUse(1.0, 9)}

    usage = Usage(lambda: held, ask)
    assert usage.gpus() == {} and not asked, "no GPU, no question"
    held.append("GPU-aa/gpu:3")
    usage.gpus()
    usage._asking.join()
    assert usage.gpus() == {"GPU-aa/gpu:3": GpuUse(0.5, 7)} and asked == [1], "asked again only after a while"
    usage.measured = ("GPU-bb/gpu:4", "boot/cpu:1")
    assert usage.gpus()["GPU-bb/gpu:4"] == GpuUse(1.0, 9), "one that the coordinator asks for"
    usage._seen_at -= 60
    assert usage.gpus() == {}, "what was seen long ago is not told"
    usage.measured = ()
    held.clear()
    assert usage.gpus() == {}


def test_the_makers_tools_tell_how_busy_a_gpu_is(tmp_path):
    said = "GPU-aa, 87, 1024\nGPU-bb, [N/A], [N/A]\nno devices were found\n"
    machine = Nvidia(tmp_path, lambda *asked: said if asked[0].startswith("--query-gpu") else "")
    assert machine.use() == {"GPU-aa": GpuUse(0.87, 1 << 30)}
    node, render = (
        tmp_path / "sys/class/kfd/kfd/topology/nodes/1",
        tmp_path / "sys/class/drm/renderD128/device",
    )
    for folder in (node, render):
        folder.mkdir(parents=True)
    (node / "properties").write_text("simd_count 416\nunique_id 255\ndrm_render_minor 128\n")
    assert Amd(tmp_path).use() == {}, "a driver that tells nothing"
    (render / "gpu_busy_percent").write_text("40\n")
    (render / "mem_info_vram_used").write_text("2048\n")
    (use,) = Amd(tmp_path).use().values()
    assert use == GpuUse(0.4, 2048)
