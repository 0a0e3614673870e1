"""Train an EAGLE-2 draft for any Hugging Face decoder, on text which that decoder writes itself.

decode     one continuous batch: contexts in, complete documents out
corpus     documents: storage, repetition loops, token counts
model      the draft: fc 2H->H and one Llama layer, as SGLang's ``LlamaForCausalLMEagle`` runs it
features   the target's last hidden states, and batches of documents by length
loss       cross-entropy through the frozen head without keeping the logits
train      the self-feeding training loop, stopped by the clock
tree       SGLang's draft tree, in torch
evaluate   accept length over whole greedy replies
accept_by_size  the same against the size of the token map
run        the stages from prompts to a measured draft; an example says what is continued

Nothing here knows a particular target: prompts, sizes and times come from the caller.
"""
