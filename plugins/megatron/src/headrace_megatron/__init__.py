"""A training backend of Headrace: megatron-core's parallel layers over NCCL (GPU) or Gloo (CPU)."""
