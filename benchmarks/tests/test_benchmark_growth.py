"""The imaginary instances of growth.py keep up with the contracts: a short run succeeds."""

import growth


def test_a_run_of_imaginary_instances_succeeds(tmp_path):
    system, samples = growth.System(tmp_path), []
    try:
        system.start()
        growth.follow(system, growth.submit(system, 2), 0, samples)
        assert samples[-1][0] == 2 * growth.SLOTS_A_STEP
        assert system.get("/v1/runs?page_size=1")["runs"][0]["recoveries"] == 0
    finally:
        system.end()
