"""Where a cycle's time goes: the parts of drafting and verification, measured and predicted."""
