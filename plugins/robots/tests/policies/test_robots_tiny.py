"""Tiny vision-language-action policies: what the command writes is what a run reads."""

from __future__ import annotations

import pytest
import torch
from headrace_robots.policies.directory import load_policy
from headrace_robots.policies.language import instruction_encoder
from headrace_robots.policies.policy import Observation
from headrace_robots.tiny import main

ASKED = "In: What action should the robot take to push the cube?\nOut:"


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("openvla", []),
        ("openvla_oft", ["--chunk-length", "3", "--state", "5"]),
        ("pi0", ["--chunk-length", "3", "--state", "5"]),
        ("pi05", ["--chunk-length", "3", "--state", "5"]),
        ("smolvla", ["--chunk-length", "3", "--state", "5"]),
        ("groot", ["--chunk-length", "3", "--state", "5"]),
        ("wall", ["--chunk-length", "3", "--state", "5"]),
        ("act", ["--chunk-length", "3", "--state", "5"]),
        ("diffusion", ["--chunk-length", "3", "--state", "5"]),
    ],
)
def test_the_directory_acts_on_pictures_and_words(tmp_path, kind, more):
    directory = tmp_path / "policy"
    main([str(directory), "--kind", kind, "--actions", "4", *more])
    policy = load_policy(directory)
    ids = instruction_encoder(policy.config, str(directory))(ASKED)
    assert len(ids) >= len(ASKED) * policy.config.reads, "every character is known"
    unknown = 2
    assert unknown not in ids
    pictures = torch.randint(0, 256, (2, 64, 64, 3), dtype=torch.uint8)
    seen = Observation(torch.zeros(2, 5), {"image": pictures}, (ids, ids))
    chunk = policy.act(seen, [1, 2])
    assert chunk.executed_BCA.shape == (2, 3 if more else 1, 4)
    assert chunk.executed_BCA.abs().max() <= 1
    with torch.no_grad():
        again = policy.evaluate(seen, chunk.sampled)
    torch.testing.assert_close(again.log_probs_BCA, chunk.log_probs_BCA, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--kind", "pi0", "--actions", "4"], "give --state"),
        (["--kind", "openvla", "--actions", "4", "--chunk-length", "2"], "set kind: openvla_oft"),
        (["--actions", "0"], "1 or more"),
    ],
)
def test_what_fits_no_policy_is_refused(tmp_path, capsys, arguments, said):
    with pytest.raises(SystemExit):
        main([str(tmp_path / "policy"), *arguments])
    assert said in capsys.readouterr().err
    assert not (tmp_path / "policy").exists()


def test_a_policy_that_is_there_is_left_alone(tmp_path, capsys):
    main([str(tmp_path / "policy"), "--actions", "4"])
    before = (tmp_path / "policy" / "model.safetensors").read_bytes()
    with pytest.raises(SystemExit):
        main([str(tmp_path / "policy"), "--actions", "4", "--seed", "1"])
    assert "holds a policy already" in capsys.readouterr().err
    assert (tmp_path / "policy" / "model.safetensors").read_bytes() == before
