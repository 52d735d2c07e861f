"""Which GPUs a process can use, on machines that are trees of files: the kernel's, the container's, the variables'."""

import pytest
from headrace_servicekit.lease.gpus import (
    Amd,
    Gpu,
    Nvidia,
    chosen,
    find_gpus,
    gpu_memory,
    parse_gpus,
    read_gpu_memory,
)

DRIVER_FILE = """Model: \t\t NVIDIA H100
IRQ:   \t\t 35
GPU UUID: \t GPU-{uuid}
Bus Location: \t 0000:{bus}:00.0
Device Minor: \t {minor}
"""
NVIDIA_SMI = """
GPU 00000000:05:00.0
    GPU UUID                              : GPU-8f2a
    Minor Number                          : 3
GPU 00000000:06:00.0
    GPU UUID                              : GPU-????????-????
    Minor Number                          : 4
"""
LISTING = """GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-aa)
  MIG 3g.20gb     Device  0: (UUID: MIG-one)
  MIG 1g.5gb      Device  1: (UUID: MIG-two)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-bb)
"""


def silent(*arguments):
    return ""


def nvidia(root, *, nodes=(), uuids=("aa", "bb", "cc"), contained=False, ask=silent):
    """A machine whose drivers number its GPUs against their order on the bus: aa has minor 2, cc has 0."""
    for index, uuid in enumerate(uuids):
        folder = root / "proc/driver/nvidia/gpus" / f"0000:{5 + index:02}:00.0"
        folder.mkdir(parents=True)
        minor = len(uuids) - 1 - index
        (folder / "information").write_text(DRIVER_FILE.format(uuid=uuid, bus=5 + index, minor=minor))
    (root / "dev").mkdir()
    for node in nodes:
        (root / "dev" / f"nvidia{node}").touch()
    if contained:
        (root / ".dockerenv").touch()
    return Nvidia(root, ask)


def uuids(environ, *makers):
    return [gpu.uuid.removeprefix("GPU-") for gpu in find_gpus(environ, makers)]


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (None, "aa bb cc"),
        ("", ""),
        ("-1", ""),
        ("NoDevFiles", ""),
        ("0", "aa"),
        ("2,0", "cc aa"),
        (" 1 , 1", "bb"),
        ("GPU-b", "bb"),
        ("GPU-cc,0", "cc aa"),
        ("1,7,0", "bb"),
        ("GPU-dd", ""),
        ("GPU-", ""),
    ],
)
def test_the_variable_is_read_as_cuda_reads_it(tmp_path, value, found):
    environ = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    assert uuids(environ, nvidia(tmp_path)) == found.split()


def test_gpus_keep_the_drivers_numbers_and_their_order_on_the_bus(tmp_path):
    assert [gpu.name for gpu in nvidia(tmp_path).gpus()] == ["GPU-aa/gpu:2", "GPU-bb/gpu:1", "GPU-cc/gpu:0"]


@pytest.mark.parametrize(
    ("nodes", "contained", "found"),
    [((), False, "aa bb cc"), ((), True, ""), ((0, 2), True, "aa cc"), ((1,), False, "bb")],
)
def test_a_container_has_the_gpus_whose_nodes_it_has(tmp_path, nodes, contained, found):
    """The kernel shows all three everywhere; a host that has used none has no node yet."""
    assert uuids({}, nvidia(tmp_path, nodes=nodes, contained=contained)) == found.split()


def test_indices_count_what_the_container_has(tmp_path):
    machine = nvidia(tmp_path, nodes=(0, 1), contained=True)
    assert uuids({"CUDA_VISIBLE_DEVICES": "1"}, machine) == ["cc"]


@pytest.mark.parametrize("word", ["none", "void"])
def test_a_container_that_is_to_have_none_has_none(tmp_path, word):
    assert uuids({"NVIDIA_VISIBLE_DEVICES": word}, nvidia(tmp_path)) == []
    assert len(find_gpus({"NVIDIA_VISIBLE_DEVICES": "all"}, [Nvidia(tmp_path, silent)])) == 3


def test_parts_of_a_divided_gpu_stand_for_it(tmp_path):
    machine = nvidia(tmp_path, uuids=("aa", "bb"), ask=lambda *asked: LISTING if asked == ("-L",) else "")
    assert uuids({}, machine) == ["aa", "bb"], "nothing is divided: nobody is asked"
    (tmp_path / "proc/driver/nvidia/capabilities/gpu1/mig/gi1").mkdir(parents=True)
    names = [gpu.name for gpu in find_gpus({}, [machine])]
    assert names == ["MIG-one/gpu:1.0", "MIG-two/gpu:1.1", "GPU-bb/gpu:0"]
    assert uuids({"CUDA_VISIBLE_DEVICES": "MIG-two"}, machine) == ["MIG-two"]


def test_memory_of_whole_gpus_and_of_parts_is_told_by_name(tmp_path):
    (tmp_path / "proc/driver/nvidia/capabilities/gpu1/mig/gi1").mkdir(parents=True)
    machine = nvidia(
        tmp_path,
        uuids=("aa", "bb"),
        ask=lambda *asked: LISTING if asked == ("-L",) else "GPU-aa, 40960\nGPU-bb, [N/A]\n",
    )
    listed = gpu_memory(["MIG-one/gpu:1.0", "GPU-aa/gpu:1", "GPU-bb/gpu:0", "b00t/cpu:0"], [machine])
    assert listed == [f"MIG-one/gpu:1.0={20 << 30}", f"GPU-aa/gpu:1={40 << 30}"]
    assert read_gpu_memory([*listed, "other"]) == {"MIG-one/gpu:1.0": 20 << 30, "GPU-aa/gpu:1": 40 << 30}
    assert gpu_memory(["b00t/cpu:0"], [machine]) == []


def test_memory_of_amds_gpus_is_in_the_drivers_files(tmp_path):
    machine = amd(tmp_path)
    (tmp_path / "sys/class/drm/renderD128/device").mkdir(parents=True)
    (tmp_path / "sys/class/drm/renderD128/device/mem_info_vram_total").write_text("206141652992\n")
    assert machine.memory() == {"GPU-72ff9d1a3a4ba6bb": 206141652992}


def test_what_the_drivers_files_lack_is_asked_for(tmp_path):
    assert parse_gpus(NVIDIA_SMI) == [Gpu("GPU-8f2a", "3")]
    bare = Nvidia(tmp_path, lambda *asked: NVIDIA_SMI if asked == ("-q",) else "")
    assert uuids({}, bare) == ["8f2a"]
    unknown = nvidia(tmp_path, uuids=("????-?", "bb"), ask=lambda *asked: NVIDIA_SMI)
    assert uuids({}, unknown) == ["8f2a"]


OF_WSL = """
GPU 00000000:01:00.0
    GPU UUID                              : GPU-wsl1
    Minor Number                          : N/A
GPU 00000000:02:00.0
    GPU UUID                              : GPU-wsl2
    Minor Number                          : N/A
"""


@pytest.mark.parametrize("contained", [False, True])
def test_gpus_of_wsl_have_no_minor_number_and_no_nodes_of_their_own(tmp_path, contained):
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/dxg").touch()
    if contained:
        (tmp_path / ".dockerenv").touch()
    machine = Nvidia(tmp_path, lambda *asked: OF_WSL if asked == ("-q",) else "")
    assert machine.gpus() == [Gpu("GPU-wsl1", "0"), Gpu("GPU-wsl2", "1")]
    assert uuids({"CUDA_VISIBLE_DEVICES": "1"}, machine) == ["wsl2"]


def amd(root, *, nodes=(128, 129), unique=(0x72FF9D1A3A4BA6BB, 0)):
    """A CPU and two GPUs, of which the older one has no identifier."""
    topology = root / "sys/class/kfd/kfd/topology/nodes"
    rows = ["cpu_cores_count 64\nsimd_count 0\n"]
    rows += [
        f"simd_count 416\nunique_id {number}\ndrm_render_minor {128 + index}\nlocation_id {768 + index}\ndomain 1\n"
        for index, number in enumerate(unique)
    ]
    for index, text in enumerate(rows):
        (topology / str(index)).mkdir(parents=True)
        (topology / str(index) / "properties").write_text(text)
    (root / "dev/dri").mkdir(parents=True)
    for node in nodes:
        (root / f"dev/dri/renderD{node}").touch()
    return Amd(root)


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, "72ff9d1a3a4ba6bb 0001-0301"),
        ({"HIP_VISIBLE_DEVICES": "1"}, "0001-0301"),
        ({"CUDA_VISIBLE_DEVICES": "1"}, "0001-0301"),
        ({"CUDA_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "0"}, "72ff9d1a3a4ba6bb"),
        ({"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "0"}, "0001-0301"),
        ({"ROCR_VISIBLE_DEVICES": "GPU-72ff9d1a3a4ba6bb"}, "72ff9d1a3a4ba6bb"),
        ({"ROCR_VISIBLE_DEVICES": ""}, ""),
    ],
)
def test_amds_gpus_are_found_in_the_kernels_topology(tmp_path, environ, found):
    assert uuids(environ, amd(tmp_path)) == found.split()


def test_amds_gpus_of_a_container_are_those_whose_nodes_it_has(tmp_path):
    assert [gpu.name for gpu in find_gpus({}, [amd(tmp_path, nodes=(129,))])] == ["GPU-0001-0301/gpu:1"]


def test_without_gpus_there_are_none_and_another_maker_is_asked(tmp_path):
    assert find_gpus({}, [Nvidia(tmp_path, silent), Amd(tmp_path)]) == []
    assert uuids({}, Nvidia(tmp_path, silent), amd(tmp_path / "other"))[0] == "72ff9d1a3a4ba6bb"
    assert chosen([], "0") == []
