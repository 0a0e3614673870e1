"""From files of text to token counts: sources, their formats, and parallel tokenization."""
