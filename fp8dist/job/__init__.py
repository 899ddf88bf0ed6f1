"""A prepared model in its training job: which Linears are in FP8, attach, one optimizer step, saving and loading."""
