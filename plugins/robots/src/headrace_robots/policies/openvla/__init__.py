"""OpenVLA: the policy, its encoders, its action tokens, and its checkpoints as they are published."""
