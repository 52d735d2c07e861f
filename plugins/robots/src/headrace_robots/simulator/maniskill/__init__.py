"""ManiSkill 3: its tasks and ours, their scripted policies, and what a variant changes in their scenes."""
