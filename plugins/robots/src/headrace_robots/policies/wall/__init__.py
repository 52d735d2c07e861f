"""WALL-OSS: a Qwen2.5-VL whose layers have a feed-forward part of their own for actions, which follow a flow."""
