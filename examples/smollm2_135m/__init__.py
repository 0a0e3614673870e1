"""SmolLM2-135M-Instruct with a trained EAGLE draft and a ranked token map."""
