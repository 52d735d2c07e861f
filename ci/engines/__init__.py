"""The environments of vLLM and SGLang, for each kind of device: made, resolved, and tested on the CPU."""
