"""No fused split."""
