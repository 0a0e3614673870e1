"""The subcommands of ``frspec`` that make and judge token maps."""
