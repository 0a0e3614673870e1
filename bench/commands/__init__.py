"""One module a subcommand of ``python -m bench``; each has ``main(argv) -> exit status``."""
