"""GR00T N1.7: a Qwen3-VL that reads images and an instruction, and a diffusion transformer that follows a flow."""
