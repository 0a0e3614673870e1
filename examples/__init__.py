"""Complete runs on real models."""
