"""A port for a process that binds it later: none that the kernel may give to somebody else meanwhile."""

import socket

from headrace_servicekit.rpc import addresses as ports


def test_a_port_is_free_and_none_that_the_kernel_gives_away():
    kernels = int(ports.KERNELS_RANGE.read_text().split()[0]) if ports.KERNELS_RANGE.exists() else ports.LAST
    for _ in range(20):
        port = ports.free_port()
        assert ports.FIRST <= port < ports.LAST <= max(kernels, ports.LAST)
        with socket.socket() as mine:
            mine.bind((ports.LOOPBACK, port))


def test_a_port_that_somebody_has_is_not_chosen(tmp_path):
    with socket.socket() as theirs:
        theirs.bind((ports.LOOPBACK, 0))
        taken = theirs.getsockname()[1]
        assert ports.free_port(taken, taken + 1, tmp_path / "nothing") not in (0, taken)


def test_where_all_ports_are_the_kernels_any_one_is_taken(tmp_path):
    (tmp_path / "range").write_text("1024\t65535\n")
    assert ports.free_port(kernels=tmp_path / "range") > 0
