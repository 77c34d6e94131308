"""Who exchanges with whom, and what that sends."""
