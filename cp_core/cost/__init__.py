"""What a turn, a decode step and a migration cost on given hardware, and what fits its memory. Pure Python, no torch.

`cp_core.cost.model` predicts one prefill step from a rank's rates; here a hardware profile gives those rates, tensor
parallel sums and overheads join in, and the constants of a profile are fitted to published or measured times.
"""
