"""Bounds of one instance's memory. What a run may set is in `headrace_schema.openings.RolloutConfig`."""

# Bodies that an instance keeps for one run before it takes no more work.
RETENTION_BYTES = 1 << 30
# Samples without a row, beyond which a stream's next assignment waits.
WAITING_SAMPLES = 4096
# Most bytes of one streamed response.
RESPONSE_BYTES = 1 << 20
